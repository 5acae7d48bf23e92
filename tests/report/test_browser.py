"""The page in a real browser: quiet, drawn, readable and true, in every light and width."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.report import samples

from pageforge.bench.results import read_results
from pageforge.report import trace

playwright = pytest.importorskip("playwright.sync_api")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

DESKTOP = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
PHONE = {
    "viewport": {"width": 360, "height": 740},
    "reduced_motion": "reduce",
    "is_mobile": True,
    "has_touch": True,
}

PRINTED = 690
"""CSS pixels of a page of A4 within its margins, at most."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        reason = f"no browser here: none of {', '.join(BROWSERS)}; apt-get install chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with playwright.sync_playwright() as driver:
        # Without a sandbox: containers run tests as root, and the page is our own.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opened(
    browser: Any, text: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Opens the page; at the end, no page has complained or asked the network for anything."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text, encoding="utf-8")
    contexts: list[Any] = []
    complaints: list[str] = []

    def note_request(request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            complaints.append(request.url)

    def open_page(**options: Any) -> Any:
        contexts.append(browser.new_context(offline=True, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", note_request)
        page.goto(path.as_uri())
        page.wait_for_function("document.documentElement.dataset.drawn")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def desktop(opened: Callable[..., Any]) -> Any:
    return opened(**DESKTOP, color_scheme="light")


# --- charts ---------------------------------------------------------------------------------


def test_every_chart_has_data(desktop: Any) -> None:
    charts = desktop.query_selector_all(".chart")
    asked = {chart.get_attribute("id").partition("-")[0] for chart in charts}
    assert asked == samples.SAMPLES.keys() - {samples.MISSING}
    for chart in charts:
        points = chart.evaluate(
            """place => place.calcdata.map(points => points.filter(
                point => Number.isFinite(point.x ?? point.s) && Number.isFinite(point.y ?? point.p)
            ).length)"""
        )
        assert points, chart.get_attribute("id")
        assert all(points), chart.get_attribute("id")
        assert chart.query_selector_all(".trace .point, .trace .js-line")


def test_a_pointer_reads_any_decode_step(desktop: Any) -> None:
    chart = desktop.query_selector("#vram-0-growth-0")
    chart.scroll_into_view_if_needed()
    paged = [r for r in samples.vram() if r["section"] == "growth" and r["way"] == "paged"]
    for step in (0, 137, samples.STEPS - 1):
        at = chart.evaluate(
            """(place, step) => {
                const { xaxis, yaxis } = place._fullLayout, box = place.getBoundingClientRect();
                return [box.x + xaxis._offset + xaxis.d2p(step), box.y + yaxis._offset + 50];
            }""",
            step,
        )
        desktop.mouse.move(*at)
        shown = read(chart, f"decode step {step}")
        assert f"paged : {paged[step]['mapped_bytes'] / 1e6:.4g}MB" in shown
        assert "static 512 : 603MB" in shown


@pytest.mark.parametrize(
    ("chart", "said"),
    [
        ("vram-0-most-sequences-0", "paged: 512"),
        ("latency-0-steps-0", "dynamic, P50: 5.45 ms"),
        ("kernels-0-decode-0", "1x8k"),
        ("parity-0-max-difference-0", "gpt2, paged: 0"),
    ],
)
def test_a_pointer_reads_bars_dots_and_points(desktop: Any, chart: str, said: str) -> None:
    place = desktop.query_selector(f"#{chart}")
    place.scroll_into_view_if_needed()
    point = place.query_selector(".trace .point").bounding_box()
    desktop.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    assert said in read(place, said)


def read(chart: Any, wanted: str) -> str:
    """What is shown at the pointer, once `wanted` is in it."""
    return str(
        chart.evaluate_handle(
            """(place, wanted) => new Promise((resolve, reject) => {
                const from = Date.now();
                (function look() {
                    const text = place.querySelector(".hoverlayer").textContent;
                    if (text.includes(wanted)) return resolve(text);
                    if (Date.now() - from > 5000) return reject(new Error(`shown: ${text}`));
                    setTimeout(look, 20);
                })();
            })""",
            wanted,
        ).json_value()
    )


def test_a_name_in_the_legend_hides_what_it_names(desktop: Any) -> None:
    def hidden() -> list[list[str]]:
        names = "place => place.data.filter(t => t.visible === false).map(t => t.name)"
        return [chart.evaluate(names) for chart in charts]

    button = desktop.query_selector("#latency-1-steps .legend button[data-name='fast']")
    charts = desktop.query_selector_all("#latency-1-steps .chart")
    button.click()
    assert hidden() == [["fast"], ["fast"]]
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert hidden() == [[], []]


# --- words and figures ----------------------------------------------------------------------


def test_table_cells_equal_the_json(desktop: Any, results: Path) -> None:
    tables = desktop.evaluate(
        """() => [...document.querySelectorAll("table[data-section]")].map(table => ({
            ...table.dataset,
            upright: table.classList.contains("upright"),
            names: [...table.querySelectorAll("th")].map(cell => cell.textContent),
            rows: [...table.querySelectorAll("tbody tr")].map(row =>
                [...row.querySelectorAll("td")].map(cell => cell.querySelector("data")).map(data =>
                    [data?.value ?? "", data?.textContent ?? ""])),
        }))"""
    )
    shown = {}
    for table in tables:
        names = [name.replace("\u200b", "") for name in table["names"]]
        records = zip(*table["rows"], strict=True) if table["upright"] else table["rows"]
        shown[table["set"], table["question"], table["section"]] = [
            {name: value_of(*cell) for name, cell in zip(names, record, strict=True) if cell[0]}
            for record in records
        ]
    wanted: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for path in results.rglob("*.jsonl"):
        for record in read_results(path).results:
            key = path.parent.name, path.stem, record.pop("section")
            wanted.setdefault(key, []).append(record)
    assert shown == wanted


def value_of(exact: str, text: str) -> Any:
    """A cell's value, which its text says in full, or rounded to three digits."""
    value = json.loads(exact)
    if isinstance(value, float):
        assert float(text.replace(",", "")) == pytest.approx(value, rel=5e-3)
    elif isinstance(value, int):
        assert int(text.replace(",", "")) == value
    elif isinstance(value, list):
        assert json.loads(text) == value
    else:
        assert text == ("-" if value is None else value)
    return value


def test_what_failed_was_left_out_or_is_missing_is_said(desktop: Any) -> None:
    assert samples.FAILURE in desktop.inner_text("#vram-0-growth .failures")
    assert samples.FAILURE in desktop.inner_text("#kernels tr.failed >> nth=0")
    assert samples.LEFT_OUT in desktop.inner_text("#vram .note >> nth=0")
    assert "cut short" in desktop.inner_text(f"#{samples.CUT_SHORT} .cut >> nth=0")
    assert "no result file" in desktop.inner_text(f"#{samples.MISSING} .missing")
    status = "tr:has(a[href='#{}']) td >> nth=0"
    for question, said in (
        (samples.MISSING, "missing"),
        (samples.CUT_SHORT, "cut short"),
        ("vram", "measured"),
    ):
        assert desktop.inner_text(status.format(question)) == said


def test_every_figure_says_what_on_what_and_what_not(desktop: Any) -> None:
    captions = [caption.inner_text() for caption in desktop.query_selector_all("figcaption")]
    assert len(captions) == len(desktop.query_selector_all("figure")) > 1
    for text in captions:
        for part in ("Measured:", "On:", "Not shown:", "torch 2.13.0", "pageforge 0.1.0"):
            assert part in text
        assert samples.CPU["commit"] in text or samples.H200["commit"] in text


# --- light, width, paper --------------------------------------------------------------------

PAPER = "getComputedStyle(document.body).backgroundColor"
TICK = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"


def lightness(page: Any, colour: str) -> float:
    """The mean of a computed colour's red, green and blue, 0 to 1."""
    parts = page.evaluate(colour).removeprefix("rgb(").removesuffix(")").split(",")
    return sum(map(float, parts)) / (3 * 255)


def test_light_dark_and_print(desktop: Any) -> None:
    assert lightness(desktop, PAPER) == 1
    assert lightness(desktop, TICK) < 0.5
    desktop.emulate_media(color_scheme="dark")
    desktop.wait_for_function(f"{TICK} !== 'rgb(86, 96, 105)'")
    assert lightness(desktop, PAPER) < 0.15
    assert lightness(desktop, TICK) > 0.5
    desktop.emulate_media(media="print")
    assert lightness(desktop, PAPER) == 1
    desktop.emulate_media(media="screen", color_scheme="light")
    desktop.click("#theme")  # the reader's own choice
    assert lightness(desktop, PAPER) < 0.15
    desktop.click("#theme")
    assert lightness(desktop, PAPER) == 1


def test_paper_has_room_for_the_charts(desktop: Any) -> None:
    edges = """Math.max(...[...document.querySelectorAll(".chart .main-svg")].map(chart =>
        chart.getBoundingClientRect().right - document.body.getBoundingClientRect().x))"""
    desktop.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert desktop.evaluate(edges) <= PRINTED
    desktop.evaluate("dispatchEvent(new Event('afterprint'))")
    assert desktop.evaluate(edges) > PRINTED
    assert desktop.pdf(format="A4").startswith(b"%PDF")


def test_a_phone_scrolls_one_way_only(opened: Callable[..., Any]) -> None:
    page = opened(**PHONE, color_scheme="dark")
    width = PHONE["viewport"]["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    drawings = page.query_selector_all(".chart .main-svg, .pages")
    assert len(drawings) > 1
    for drawing in drawings:
        box = drawing.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


def test_a_phone_shows_words_whole_and_that_a_table_goes_on(opened: Callable[..., Any]) -> None:
    page = opened(**PHONE, color_scheme="light")
    page.evaluate(
        """() => {  // many sets, and names longer than any word of the questions
            const all = (selector) => document.querySelectorAll(`.contents ${selector}`);
            for (const cell of all("td")) cell.append("x".repeat(50));
            for (const name of all("code")) name.textContent = "a_long_name_of_it";
        }"""
    )
    for code in page.query_selector_all(".contents th code"):
        lines = code.evaluate("element => element.getClientRects().length")
        assert lines == 1, code.inner_text()
    hint = "getComputedStyle(document.querySelector('.scroll')).backgroundImage"
    assert page.evaluate(hint).count("linear-gradient") == 4
    reason = page.query_selector("tr.failed td.reason")
    assert reason.bounding_box()["width"] <= PHONE["viewport"]["width"]


def test_a_phone_has_room_for_all_labels(opened: Callable[..., Any]) -> None:
    page = opened(**PHONE, color_scheme="light")
    ticks = page.query_selector_all(".chart .ytick text, .chart .xtick text")
    labels = [tick for tick in ticks if tick.is_visible()]  # Plotly hides those without room
    assert any("589,824 bytes" in label.text_content() for label in labels)
    for label in labels:
        box = label.bounding_box()
        assert box["x"] >= 0, label.text_content()
        assert box["x"] + box["width"] <= PHONE["viewport"]["width"], label.text_content()
    for chart in page.query_selector_all(".chart"):
        below = [tick for tick in chart.query_selector_all(".xtick text") if tick.is_visible()]
        boxes = sorted([tick.bounding_box() for tick in below], key=lambda box: box["x"])
        for left, right in pairwise(boxes):
            assert left["x"] + left["width"] < right["x"], [t.text_content() for t in below]


def test_ticks_have_a_space_before_their_unit(desktop: Any) -> None:
    ticks = [
        tick.text_content() for tick in desktop.query_selector_all("#vram-0-growth-0 .ytick text")
    ]
    assert any(tick.endswith("\N{NO-BREAK SPACE}MB") for tick in ticks), ticks


# --- the pool -------------------------------------------------------------------------------


def go_to(page: Any, step: int) -> None:
    """Move the slider, as a finger would."""
    move = "(slider, at) => { slider.value = at; slider.dispatchEvent(new Event('input')); }"
    page.query_selector(".scrub input").evaluate(move, step)


def step_of(page: Any) -> int:
    return int(page.inner_text(".step").partition("/")[0])


def test_the_pool_shows_the_recorded_run(desktop: Any) -> None:
    moments = trace.record()
    waiting = next(at for at, moment in enumerate(moments) if moment.waiting)
    for at in (0, 13, waiting, len(moments) - 1):
        go_to(desktop, at)
        moment = moments[at]
        assert step_of(desktop) == at + 1
        assert desktop.inner_text(".said") == moment.said
        assert desktop.inner_text("[data-count=used]") == str(moment.used)
        assert len(desktop.query_selector_all(".pages .held")) == moment.used
        assert len(desktop.query_selector_all(".pages .kept")) == len(moment.cached)
        listed = desktop.query_selector_all(".sequences li")
        assert len(listed) == len(moment.sequences) + len(moment.waiting)


def test_the_pool_plays_and_pauses(desktop: Any) -> None:
    go_to(desktop, 1)
    play = desktop.query_selector(".pool .play")
    play.click()
    assert play.inner_text() == "Pause"
    desktop.wait_for_function("parseInt(document.querySelector('.step').textContent) >= 4")
    play.click()
    assert play.inner_text() == "Play"
    at = step_of(desktop)
    desktop.click(".pool .on")
    desktop.click(".pool .back")
    desktop.click(".pool .back")
    assert step_of(desktop) == at - 1


def test_the_pool_begins_by_itself_only_where_things_may_move(
    opened: Callable[..., Any], desktop: Any
) -> None:
    moving = opened(**{**DESKTOP, "reduced_motion": "no-preference"})
    for page in (moving, desktop):
        page.evaluate("document.querySelector('.pages').scrollIntoView()")
    moving.wait_for_function("document.querySelector('.play').textContent === 'Pause'")
    before = step_of(desktop)
    desktop.wait_for_timeout(500)
    assert step_of(desktop) == before
