"""The page: questions, their figures and tables, and a moving picture of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pageforge._version import __version__
from pageforge.bench.questions import QUESTIONS
from pageforge.bench.results import ResultFile
from pageforge.errors import ResultsError
from pageforge.report import trace
from pageforge.report.charts import CHARTS
from pageforge.report.figures import Figure
from pageforge.report.palette import DARK, LIGHT, MARKS
from pageforge.report.panels.base import MARGIN, Panel
from pageforge.report.results import QUICK, Sets, is_quick, measured_on, subject
from pageforge.report.tables import Table, tables

ASSETS = Path(__file__).parent / "assets"

MOST_OPEN = 12
"""A table of more lines is folded up until a reader opens it."""


@dataclass(frozen=True)
class Chart:
    """A panel with its place on the page."""

    id: str
    panel: Panel


@dataclass(frozen=True)
class Shown:
    """A figure with its place on the page."""

    id: str
    figure: Figure
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Entry:
    """A question's answer from one result file, which belongs to a set."""

    set: str
    file: ResultFile
    subject: str
    on: str
    figures: Sequence[Shown]
    tables: Sequence[Table]

    @property
    def note(self) -> str:
        """What must be known of all its figures."""
        return QUICK if is_quick(self.file) else ""

    @property
    def told(self) -> str:
        """A line above its pictures."""
        return ". ".join(filter(None, [self.subject, self.note]))

    @property
    def status(self) -> str:
        """How much of an answer it is."""
        if not self.file.complete:
            return "cut short"
        if not self.file.results:
            return "left out"
        failed = all(result.get("failure") for result in self.file.results)
        if failed:
            return "could not run"
        return "quick" if is_quick(self.file) else "measured"


@dataclass(frozen=True)
class Section:
    """A question with its answers; a set may have several recordings of somebody's own runs."""

    name: str
    title: str
    entries: Sequence[Entry]

    def status(self, set_name: str) -> str:
        """How far a set answers it; "" if not at all."""
        found = dict.fromkeys(entry.status for entry in self.entries if entry.set == set_name)
        return ", ".join(found)


@dataclass(frozen=True)
class Machine:
    """What was measured on, and the result files that come from there."""

    facts: Mapping[str, Any]
    files: list[str]


def sections(sets: Sets) -> list[Section]:
    """Every question that there is, answered or not; then what else was measured.

    Where nothing but somebody's own runs was recorded, no question was asked, and none is missing.
    """
    files = [file for files in sets.values() for file in files]
    titles = {file.question: file.title for file in files}
    if titles.keys() & QUESTIONS.keys():
        titles = {name: question.title for name, question in QUESTIONS.items()} | titles
    return [Section(name, title, _entries(sets, name)) for name, title in titles.items()]


def _entries(sets: Sets, question: str) -> list[Entry]:
    answers = [
        (name, file) for name, files in sets.items() for file in files if file.question == question
    ]
    return [
        _entry(f"{question}-{number}", name, file) for number, (name, file) in enumerate(answers)
    ]


def _entry(place: str, set_name: str, file: ResultFile) -> Entry:
    found = [figure for figure in _figures(file) if figure.panels or figure.failures]
    return Entry(
        set_name,
        file,
        subject(file),
        measured_on(file),
        [_shown(f"{place}-{figure.name}", figure) for figure in found],
        tables(file.results),
    )


def _figures(file: ResultFile) -> list[Figure]:
    draw = CHARTS.get(file.question)
    try:
        return [] if draw is None else list(draw(file.results))
    except KeyError as error:
        raise ResultsError(
            f"{file.path}: expected a field {error} in each of its results, got one without it; "
            f"measure again with `pageforge bench {file.question}`"
        ) from error


def _shown(place: str, figure: Figure) -> Shown:
    charts = [Chart(f"{place}-{number}", panel) for number, panel in enumerate(figure.panels)]
    return Shown(place, figure, charts)


def page(sets: Sets, questions: Sequence[Section]) -> str:
    """All of it as one HTML text that needs nothing else."""
    import jinja2
    import plotly.offline
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    machines = _machines(sets)
    return environment.get_template("page.html").render(
        version=__version__,
        light=LIGHT,
        dark=DARK,
        swatch=MARKS["square"].outline,
        sets=list(sets),
        questions=questions,
        most_open=MOST_OPEN,
        machines=machines,
        machine_fields=list(dict.fromkeys(name for machine in machines for name in machine.facts)),
        trace=_trace(),
        trace_pages=trace.PAGES,
        trace_page_size=trace.PAGE_SIZE,
        charts=_charts(questions),
        style=_asset("page.css"),
        scripts=[Markup(plotly.offline.get_plotlyjs()), _asset("page.js"), _asset("pool.js")],
    )


def _charts(questions: Sequence[Section]) -> list[dict[str, Any]]:
    """What our script hands to Plotly, which has checked it."""
    import plotly.graph_objects

    return [
        {
            "id": chart.id,
            **plotly.graph_objects.Figure(
                chart.panel.traces(shown.figure.legend),
                {"margin": MARGIN, **chart.panel.layout(), "template": {}},
            ).to_plotly_json(),
        }
        for question in questions
        for entry in question.entries
        for shown in entry.figures
        for chart in shown.charts
    ]


def _machines(sets: Sets) -> list[Machine]:
    """What the result files say of their machines, each once."""
    found: list[Machine] = []
    for name, files in sets.items():
        for file in files:
            known = next((machine for machine in found if machine.facts == file.machine), None)
            if known is None:
                known = Machine(file.machine, [])
                found.append(known)
            known.files.append(f"{name}/{file.path.name}")
    return found


def _trace() -> dict[str, Any]:
    moments = [asdict(moment) for moment in trace.record()]
    return {"pages": trace.PAGES, "page_size": trace.PAGE_SIZE, "moments": moments}


def _asset(name: str) -> Any:
    """A file of ours, to go into the page as it is."""
    from markupsafe import Markup

    return Markup((ASSETS / name).read_text(encoding="utf-8"))
