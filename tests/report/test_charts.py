"""Each question's figures: what is drawn of its records, what is said, what missing fields do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.report import samples

from pageforge.bench.fields import is_number
from pageforge.bench.questions import QUESTIONS
from pageforge.bench.results import read_results
from pageforge.report.charts import CHARTS
from pageforge.report.figures import Figure, Record, by_way, described, failures, grouped, ran, same
from pageforge.report.panels.bars import Bars
from pageforge.report.panels.curves import Curves
from pageforge.report.panels.dots import Dots
from pageforge.report.panels.strips import Strips

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def drawn(question: str, records: list[Record] | None = None) -> dict[str, Figure]:
    found = list(samples.SAMPLES[question]()) if records is None else records
    return {figure.name: figure for figure in CHARTS[question](found)}


def test_every_question_has_charts_and_a_sample() -> None:
    assert QUESTIONS.keys() <= CHARTS.keys()
    assert samples.SAMPLES.keys() == CHARTS.keys()


@pytest.mark.parametrize("question", CHARTS)
def test_a_sample_is_drawn_and_its_failures_are_said(question: str) -> None:
    figures = drawn(question).values()
    assert any(figure.panels for figure in figures)
    for figure in figures:
        assert figure.measured.rstrip().endswith(".")
        assert figure.not_shown.endswith(".")
    failed = any(record.get("failure") for record in samples.SAMPLES[question]())
    said = [text for figure in figures for text in figure.failures]
    assert failed == any(samples.FAILURE in text for text in said)


@pytest.mark.parametrize("question", CHARTS)
def test_a_number_that_is_not_there_is_not_drawn(question: str) -> None:
    records = list(samples.SAMPLES[question]())
    numbers = {name for record in records for name in record if is_number(record[name])}
    for name in numbers:
        without = [{key: record[key] for key in record if key != name} for record in records]
        nulls = [{**record, name: None} if name in record else record for record in records]
        for changed in (without, nulls):
            for figure in CHARTS[question](changed):
                for panel in figure.panels:
                    assert json.dumps([panel.traces(figure.legend), panel.layout()])


@pytest.mark.parametrize("question", CHARTS)
def test_nothing_is_drawn_of_nothing(question: str) -> None:
    assert not any(figure.panels or figure.failures for figure in drawn(question, []).values())


COMMITTED = sorted((RESULTS / "current").rglob("*.jsonl"))
"""Whole sets: what else is there may be a part of a question that has tables alone."""


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_really_measured_is_drawn(path: Path) -> None:
    file = read_results(path)
    if all(record.get("failure") for record in file.results):
        pytest.skip("nothing could be measured there")
    assert any(figure.panels for figure in drawn(file.question, file.results).values())


# --- questions ------------------------------------------------------------------------------


def test_vram_draws_every_step() -> None:
    figures = drawn("vram")
    (mapped,) = figures["growth"].panels  # no peak was measured
    assert isinstance(mapped, Curves)
    records = ran(list(samples.vram()), "growth", "mapped_bytes")
    for curve in mapped.curves:
        assert curve.x == list(range(samples.STEPS))
        assert curve.y == [r["mapped_bytes"] for r in records if r["way"] == curve.name]
    assert " 32 sequences, 13 prompt tokens." in figures["growth"].measured
    assert [panel.title for panel in figures["most-sequences"].panels] == [
        "13 tokens",
        "113 tokens",
    ]


def test_latency_draws_percentiles_a_panel_a_case() -> None:
    panels = drawn("latency")["steps"].panels
    assert [panel.title for panel in panels] == [
        f"batch {batch}, prompt 448, 500 timed steps" for batch in (1, 32)
    ]
    assert isinstance(panels[0], Dots)
    assert panels[0].rows[0].values == pytest.approx({"P50": 5.45, "P95": 7.085, "P99": 10.355})
    assert panels[0].key == "\N{BLACK CIRCLE} P50  \N{WHITE DIAMOND} P95  | P99"


def test_kernels_draw_the_best_of_a_peers_variants_as_shares() -> None:
    (panel,) = drawn("kernels")["decode"].panels
    assert isinstance(panel, Curves)
    shares = {curve.name: curve.y for curve in panel.curves}
    assert shares["pageforge p16"] == pytest.approx([0.8, 0.8])
    assert shares["FlashAttention-3"] == pytest.approx([0.7, 0.7])
    assert panel.limits == {"read ceiling": 1.0}


def test_throughput_draws_bars_and_waits_over_rates() -> None:
    figures = drawn("throughput")
    (tokens,) = figures["tokens"].panels
    assert isinstance(tokens, Bars)
    assert tokens.bars[0].whiskers == pytest.approx((10_156.3, 10_156.3))
    titles = [panel.title for panel in figures["arrivals"].panels]
    assert titles[:2] == ["uniform: first token, P50", "uniform: first token, P99"]
    said = "Good: first token within 500 ms, then 40 ms a token."
    assert said in figures["goodput"].measured


@pytest.mark.parametrize(
    ("repeats", "low", "whiskers", "not_shown"),
    [
        (
            (3, 3),
            90.0,
            True,
            "The first run of each, which warms up; a GPU compiles and captures in it.",
        ),
        (
            (1, 1),
            100.0,
            False,
            "The first run of each, which warms up; a GPU compiles and captures in it.",
        ),
        ((0, 0), 100.0, False, "each ran once, and that first run is what is shown."),
        ((3, 0), 90.0, True, "some ran once, and that first run is what is shown."),
    ],
)
def test_what_is_said_of_runs_follows_from_them(
    repeats: tuple[int, int], low: float, whiskers: bool, not_shown: str
) -> None:
    rates = {"tokens_per_s": 100.0, "tokens_per_s_low": low, "tokens_per_s_high": 100.0}
    sizes = {"requests": 4, "prompt_tokens": 23, "new_tokens": 16}
    records = [
        {**rates, **sizes, "workload": "azure-chat", "way": way, "repeats": count, "page_size": 8}
        for way, count in zip(("engine", "generate"), repeats, strict=True)
    ]
    for question, section, name in (
        ("throughput", "throughput", "tokens"),
        ("sweep", "workload", "throughput"),
    ):
        figure = drawn(question, [{**r, "section": section} for r in records])[name]
        assert ("whiskers" in figure.measured) is whiskers
        assert figure.not_shown.endswith(not_shown)
        case = "azure-chat, 4 requests, in all 23 prompt tokens, 16 new tokens"
        assert case in figure.measured or case == figure.panels[0].title


def test_no_two_figures_have_one_title() -> None:
    titles = [figure.title for question in CHARTS for figure in drawn(question).values()]
    assert len(set(titles)) == len(titles)


def test_a_small_pools_name_says_what_it_is_a_part_of() -> None:
    figures = drawn("sweep")
    for name in ("memory", "throughput"):
        assert list(figures[name].legend) == ["ample", "1/10 of the pages needed"]
    assert figures["memory"].failures == [f"1/10, pages of 64 tokens: {samples.FAILURE}"]


def test_lifecycle_puts_the_batches_behind_each_other() -> None:
    figure = drawn("lifecycle")["timeline"]
    memory, utilisation, _ = figure.panels
    assert isinstance(memory, Curves)
    assert isinstance(utilisation, Curves)
    assert list(memory.curves[0].x) == list(range(10))
    assert memory.curves[0].labels[7] == "batch 2, step 2"
    assert utilisation.curves[0].y == [0.8, 0.8, 0.8, 0.8, None] * 2
    assert "18 of the second batch's 18 pages had been the first's." in figure.measured


def test_parity_has_a_place_for_zero() -> None:
    figure = drawn("parity")["max-difference"]
    (panel,) = figure.panels
    assert isinstance(panel, Strips)
    axis = panel.layout()["xaxis"]
    zero = axis["tickvals"][axis["ticktext"].index("0")]
    traces = {trace["name"]: trace for trace in panel.traces(figure.legend)}
    assert traces["paged"]["x"] == [zero, zero]
    assert zero < min(traces["pageforge"]["x"])
    assert traces["paged"]["text"] == ["gpt2, paged: 0", "llama, paged: 0"]
    assert traces["paged"]["y"] != traces["pageforge"]["y"]  # none hides another


def test_the_allocators_stress_is_told() -> None:
    said = drawn("allocator")["speed"].measured
    assert "64,000 pages were claimed, 64,000 returned, 0 lost." in said


# --- records --------------------------------------------------------------------------------

CASES = [
    {"section": "a", "way": "fast", "batch": 32, "new_tokens": 1000, "ms": 2.0, "ms_low": 1.0},
    {"section": "a", "way": "fast", "batch": 1, "new_tokens": 1000, "ms": 3.0},
    {"section": "a", "way": "slow", "batch": 1, "new_tokens": 1000, "ms": None, "failure": "why"},
    {"section": "b", "failure": "no device"},
]


def test_a_case_is_described_as_people_say_it() -> None:
    assert described(CASES[0], "way", "batch", "new_tokens", "none") == [
        "fast",
        "batch 32",
        "1,000 new tokens",
    ]


def test_what_ran_has_its_numbers() -> None:
    assert ran(CASES, "a", "ms") == CASES[:2]
    assert ran(CASES, "b", "ms") == []


def test_failures_are_named_by_what_is_known_of_them() -> None:
    assert failures(CASES, "a", "way", "batch") == ["slow, batch 1: why"]
    assert failures(CASES, "b", "way") == ["no device"]


def test_what_all_agree_on_is_said_once() -> None:
    assert same(CASES[:2], "way", "batch", "new_tokens") == "Fast, 1,000 new tokens."
    assert same([], "way") == ""


def test_groups_and_curves_are_in_order() -> None:
    assert list(grouped(CASES[:3], "batch")) == ["batch 32", "batch 1"]
    (curve,) = by_way(CASES[:2], "batch", "ms", spread=True)
    assert (curve.name, curve.x, curve.y) == ("fast", [1, 32], [3.0, 2.0])
    assert (list(curve.low), list(curve.high)) == ([None, 1.0], [None, None])
