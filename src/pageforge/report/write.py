"""`write_report`: a folder of result files becomes a page and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pageforge.report.extra import check_extra
from pageforge.report.page import Section, page, sections
from pageforge.report.pictures import picture
from pageforge.report.results import read_sets

PAGE, PICTURES = "report.html", "plots"


def write_report(folder: Path, out: Path) -> list[Path]:
    """Write `report.html` and `plots/*.png` into `out`; returns what was written, the page first.

    `folder`: result files of `pageforge bench`, or folders of them. Raises ResultsError, which
    names the file, if one is wrong or there is none, MissingExtra without the drawing libraries,
    and OSError; nothing is written before all files were read.
    """
    check_extra()
    sets = read_sets(folder)
    questions = sections(sets)
    text = page(sets, questions)
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    path.write_text(text, encoding="utf-8")
    return [path, *_pictures(questions, out / PICTURES)]


def _pictures(questions: Sequence[Section], folder: Path) -> Iterator[Path]:
    """A PNG file of each figure that has something to show."""
    for question in questions:
        for entry in question.entries:
            head = f"{entry.set.replace('/', '-')}-{entry.file.path.stem}"
            for shown in entry.figures:
                if shown.charts:
                    path = folder / f"{head}-{shown.figure.name}.png"
                    picture(shown.figure, entry.told, entry.on, path)
                    yield path
