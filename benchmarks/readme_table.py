"""The tables of results in the README and in docs/results.md, made from the committed files.

    python benchmarks/readme_table.py           # writes both; into README.md between the markers
    python benchmarks/readme_table.py --check   # only says whether they are what they should be

Each folder `benchmarks/results/current/<machine>/<model>/` is one set of results, as
`pageforge bench` writes it. What a set lacks is "not measured"; what failed says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageforge.bench.report import cell
from pageforge.bench.results import ResultFile, read_folder
from pageforge.errors import ResultsError

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "results.md"
CURRENT = ROOT / "benchmarks" / "results" / "current"

BEGIN = "<!-- results: made by python benchmarks/readme_table.py, do not edit -->"
END = "<!-- /results -->"

HEAD = """# Results

<!-- made by python benchmarks/readme_table.py, do not edit -->

Made from the files in [results/current](../benchmarks/results/current), a folder for each machine
and model; `pageforge report` draws such a folder. What is measured, and how:
[benchmarks.md](benchmarks.md).

"""

Record = dict[str, Any]
Row = Sequence[object]

CURVE_MODEL, CURVE_STEPS = "gpt2", (0, 25, 100, 250, 500)
"""Of which memory curve the README has how much; the rest is in the files and the report."""

CURVE_WAYS = ("paged", "dynamic", "static 512", "static 1024")

PEAK_WAYS, OVER_WAYS = ("paged", "dynamic"), ("dynamic", "static 1024")

STEP_WAYS = ("dynamic", "static", "static compiled", "paged", "pageforge", "fast", "fast compiled")

LOAD = 90
"""Of the rates at which requests come, in percent of what the engine can do, the one shown."""

PARITY_WAYS = ("paged", "pageforge", "fast", "engine")

PROMPT = 448
"""The prompt of the steps that the README has: the longer, and so the slower for everyone."""


@dataclass(frozen=True)
class ResultSet:
    """The results of one model on one machine."""

    machine: str
    model: str
    files: dict[str, ResultFile]

    @property
    def name(self) -> str:
        return f"{self.machine}, {self.model}"

    def records(self, question: str, section: str, **wanted: object) -> list[Record]:
        """Those of a section whose fields are as `wanted`."""
        file = self.files.get(question)
        return [
            record
            for record in ([] if file is None else file.results)
            if record["section"] == section
            and all(record.get(name) == value for name, value in wanted.items())
        ]


def read_sets(current: Path) -> list[ResultSet]:
    """All of `<machine>/<model>` in a folder, by name; none where there is no such folder."""
    return [
        ResultSet(folder.parent.name, folder.name, _of_model(read_folder(folder), folder.name))
        for folder in sorted(current.glob("*/*"))
        if folder.is_dir()
    ]


def _of_model(files: Sequence[ResultFile], model: str) -> dict[str, ResultFile]:
    """The files by question. Raises ResultsError where one is of another model than its folder."""
    for file in files:
        for record in () if file.question in OF_ANY_MODEL else file.results:
            if record.get("model", model) != model:
                raise ResultsError(
                    f"{file.path}: expected results of {model}, as its folder is called, got "
                    f"{record['model']}; measure with --model {model}"
                )
    return {file.question: file for file in files}


# --- Markdown -------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Row]) -> list[str]:
    """Lines of a Markdown table, numbers to the right. A row may end early."""
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    for row in rows:
        cells = [*map(shown, row), *[""] * (len(columns) - len(row))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def shown(value: object) -> str:
    """A cell: an empty one where there is nothing."""
    return "" if value is None else cell(value).replace("|", "\\|")


def mb(num_bytes: int | None) -> float | None:
    """Megabytes, 10^6."""
    return None if num_bytes is None else num_bytes / 1e6


def over(value: float | None, base: float | None) -> float | None:
    """`value / base`, if both are there."""
    return value / base if value is not None and base else None


def between(values: Iterable[float | None]) -> str | None:
    """`least to most`, or the one value that there is."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    least, most = cell(min(found)), cell(max(found))
    return least if least == most else f"{least} to {most}"


def done(records: Iterable[Record]) -> list[Record]:
    """Those that did not fail."""
    return [record for record in records if not record.get("failure")]


# --- the tables -----------------------------------------------------------------------------


def memory(sets: Sequence[ResultSet]) -> Iterator[str]:
    """The curve, what is left afterwards, and how many sequences fit."""
    measured = [each for each in sets if each.model == CURVE_MODEL]
    curve = [row for each in measured for row in _curve(each)]
    fits = [row for each in measured for row in _fits(each)]
    if curve:
        yield f"32 sequences of {CURVE_MODEL}'s shape, prompts of 13 tokens, one token a step: MB"
        yield "(10^6 bytes) that the driver (CUDA) or the operating system says are taken; at the"
        yield "peak also what a step needs besides."
        yield ""
        peaks = (f"peak: {way}" for way in PEAK_WAYS)
        ratios = (f"{way} / paged" for way in OVER_WAYS)
        yield from table(("", "step", "tokens a row", *CURVE_WAYS, *peaks, *ratios), curve)
    if fits:
        yield ""
        yield "Sequences that a pool of 512 pages holds, found by filling it, and other caches in"
        yield "as many bytes:"
        yield ""
        yield from table(("", "tokens each", "MB", *CURVE_WAYS), fits)


def _curve(each: ResultSet) -> Iterator[Row]:
    points = {(r["way"], r["step"]): r for r in each.records("vram", "growth") if "step" in r}
    last = max((step for _, step in points), default=0)
    for step in dict.fromkeys(min(step, last) for step in CURVE_STEPS):
        ways = {way: points.get((way, step), {}) for way in CURVE_WAYS}
        taken = {way: record.get("mapped_bytes") for way, record in ways.items()}
        peaks = (ways[way].get("peak_bytes") for way in PEAK_WAYS)
        tokens = next((record["tokens"] for record in ways.values() if record), None)
        ratios = (over(taken[way], taken["paged"]) for way in OVER_WAYS)
        if tokens is not None:
            yield each.machine, step, tokens, *map(mb, (*taken.values(), *peaks)), *ratios
    for record in each.records("vram", "afterwards", way="paged", when="trimmed"):
        yield each.machine, "after `free()` and `trim()`", None, mb(record["mapped_bytes"])


def _fits(each: ResultSet) -> Iterator[Row]:
    records = each.records("vram", "most-sequences")
    for tokens in dict.fromkeys(record["tokens"] for record in records):
        ways = {record["way"]: record for record in records if record["tokens"] == tokens}
        found = (ways.get(way, {}) for way in CURVE_WAYS)
        size = mb(ways.get("paged", {}).get("storage_bytes"))
        yield (
            each.machine,
            tokens,
            size,
            *("failed" if one.get("failure") else one.get("sequences") for one in found),
        )


def latency(sets: Sequence[ResultSet]) -> Iterator[str]:
    """P50 and P99 of every way, and what mixed lengths cost."""
    rows: list[Row] = []
    for each in sets:
        records = each.records("latency", "steps", prompt=PROMPT)
        for batch in dict.fromkeys(record["batch"] for record in records):
            rows.append((each.name, batch, *_times(records, batch)))
        padded = each.records("latency", "padded")
        if padded:
            batch = padded[0]["batch"]
            rows.append((each.name, f"{batch}, left-padded", *_times(padded, batch)))
    if rows:
        yield f"A decode step, ms: P50 (P99), prompt {PROMPT}, the model call alone, cuDNN"
        yield "attention off, all ways by turns:"
        yield ""
        yield from table(("", "batch", *STEP_WAYS), rows)


def generate(each: ResultSet) -> Iterator[Row]:
    """`model.generate` as users call it, caches made in the call: (what, figure)."""
    for record in done(each.records("latency", "generate")):
        what = f"`generate`, {record['batch']} rows, {record['new_tokens']} new tokens each"
        ratio = record.get("over_dynamic")
        share = "" if ratio is None else f" ({ratio:.2f} of DynamicCache's)"
        yield f"{what}, {record['way']}: tokens/s", f"{cell(record['tokens_per_s'])}{share}"


def _times(records: Sequence[Record], batch: int) -> Iterator[str | None]:
    ways = {record["way"]: record for record in records if record["batch"] == batch}
    for way in STEP_WAYS:
        record = ways.get(way)
        if record is None:
            yield None
        elif record.get("failure"):
            yield "failed"
        else:
            yield f"{cell(record['p50_ms'])} ({cell(record['p99_ms'])})"


def throughput(sets: Sequence[ResultSet]) -> Iterator[str]:
    """Tokens a second all at once, and what requests wait that arrive."""
    rows: list[Row] = []
    waits: list[Row] = []
    for each in sets:
        for record in each.records("throughput", "throughput"):
            if "workload" not in record:  # the question failed as a whole
                continue
            rows.append(
                (
                    f"{each.name}: {record['requests']:,} {record['workload']}",
                    record["way"],
                    record.get("failure") or record["tokens_per_s"],
                    between((record.get("tokens_per_s_low"), record.get("tokens_per_s_high"))),
                    record.get("over_generate"),
                    record.get("first_run_s"),
                    record.get("floor_share"),
                )
            )
        for record in each.records("throughput", "arrivals", load_percent=LOAD):
            waits.append(
                (
                    f"{each.name}: {record['workload']}",
                    record["way"],
                    record.get("failure") or record["rate_per_s"],
                    record.get("achieved_per_s"),
                    *(_wait(record, name) for name in ("ttft", "tpot", "itl")),
                    record.get("goodput_share"),
                )
            )
    if rows:
        yield "Whole workloads, text included, the first run (captures, compiling) apart. The"
        yield "floor is what reading weights and K/V, or arithmetic, takes at measured rates."
        yield ""
        columns = ("", "way", "tokens/s", "slowest to fastest", "/ generate", "first run, s")
        yield from table((*columns, "share of the floor"), rows)
    if waits:
        yield ""
        yield f"Requests that arrive one after the other, at {LOAD}% of the rate at which they are"
        yield "answered if all are there at once: milliseconds, P50 (P99):"
        yield ""
        columns = ("", "way", "offered/s", "answered/s", "to the first token", "a token")
        yield from table((*columns, "between tokens", "good share"), waits)
        yield ""
        yield "Good: first token within 0.5 s (2 s on a CPU), the others 40 (200) ms each."


def _wait(record: Record, name: str) -> str:
    return f"{cell(record.get(f'{name}_p50_ms'))} ({cell(record.get(f'{name}_p99_ms'))})"


def engine(each: ResultSet) -> Iterator[Row]:
    """What else was seen of the engine: (what, figure)."""
    for record in done(each.records("throughput", "first-token")):
        yield f"construct to first token, s: {record['when']}", record["first_token_s"]
    for record in done(each.records("throughput", "shared-prefix")):
        what = f"{record['requests']:,} requests that share {record['shared_tokens']:,} tokens"
        yield f"{what}: computed / each once", f"{record['computed_over_once']:.3f}"
    for record in done(each.records("throughput", "rollout")):
        what = f"{record['requests']:,} prompts, several samples each"
        yield f"{what}: pages / prompts stored once", f"{record['peak_over_once']:.3f}"
    for record in each.records("throughput", "squeezed", way="squeezed"):
        what = "a tenth of the pages: tokens/s / as many rows in ample ones"
        yield f"{what} (outputs that are the same)", _squeezed(record)
    for record in done(each.records("throughput", "host")):
        what = f"a step of {record['running']:,} rows, ms: host's work (its planning)"
        yield what, f"{cell(record['host_ms'])} ({cell(record['plan_ms'])})"
        if record.get("idle") is not None:
            yield f"a step of {record['running']:,} rows: device idle", f"{record['idle']:.3f}"


def _squeezed(record: Record) -> str | None:
    if record.get("failure"):
        return "failed"
    outputs = f"{record.get('same')} of {record['requests']}"
    return f"{cell(record.get('over_as_many'))} ({outputs})"


def pages(each: ResultSet) -> Iterator[Row]:
    """What becomes of pages, and of what they hold: (what, figure)."""
    for record in done(each.records("lifecycle", "reuse")):
        what = "pages of a second batch that were the first's"
        yield what, f"{record['pages_reused']} of {record['pages_second']}"
    speeds = done(each.records("allocator", "speed"))
    for load in dict.fromkeys(record["load"] for record in speeds):
        of_load = [record for record in speeds if record["load"] == load]
        sizes = f"pools of {of_load[0]['pages_total']:,} to {of_load[-1]['pages_total']:,} pages"
        rates = between(record["pages_per_s"] / 1e6 for record in of_load)
        yield f"allocator, {load}, {sizes}: M pages/s", rates
    for way in PARITY_WAYS:
        found = done(each.records("parity", "parity", way=way, dtype="float32"))
        differences = [record.get("max_difference") for record in found]
        if (largest := between(differences)) is not None:
            same = sum(record["parted"] == 0 for record in found)
            what = f"`{way}` against DynamicCache in fp32: largest difference of logits"
            yield f"{what} (models with the same tokens)", f"{largest} ({same} of {len(found)})"


def kernels(sets: Sequence[ResultSet]) -> Iterator[str]:
    """Beside FlashAttention-3, and shares of what the memory can do."""
    rows: list[Row] = []
    for each in sets:
        rows += ((each.machine, *row) for row in _kernels(each))
    if rows:
        yield "Kernels, over K/V that no cache holds:"
        yield ""
        yield from table(("", "what", "figure", "least to most"), rows)


def _kernels(each: ResultSet) -> Iterator[Row]:
    summary = each.records("kernels", "decode summary")
    for record in summary:
        if "peer" in record:
            slower = f"{record['worst']:.2f} at worst; slower in {record['slower_than_peer']}"
            what = f"decode, times as fast as {record['peer']}, {record['shapes']} shapes"
            yield what, f"{record['geometric_mean']:.2f}", f"{slower} of them"
    shares = [record["worst_share"] for record in summary if "worst_share" in record]
    if shares:
        worst = f"{min(shares):.2f} at worst"
        yield "decode of 64 MB or more, share of the read ceiling", None, worst
    reads = [record["worst_over_read"] for record in summary if record.get("worst_over_read")]
    if reads:
        what = "decode of 64 MB or more, times as long as a plain read of as many bytes"
        yield what, None, f"{max(reads):.2f} at worst"
    for op in dict.fromkeys(record["op"] for record in each.records("kernels", "cache")):
        records = each.records("kernels", "cache", op=op)
        rates = [over(record.get("bytes_per_s"), 1e9) for record in records]
        share = between(record.get("share_of_ceiling") for record in records)
        yield f"`{op}`, share of the copy ceiling (GB/s)", None, f"{share} ({between(rates)})"
    ratios = list(_prefill_ratios(each.records("kernels", "prefill")))
    if ratios:
        yield "prefill, times as fast as FlashAttention-3", None, between(ratios)
    for record in each.records("kernels", "invariant summary"):
        cost = f"{record['geometric_mean']:.2f}"
        yield "`batch_invariant=True`, times as long", cost, f"{record['worst']:.2f} at worst"


def _prefill_ratios(records: Sequence[Record]) -> Iterator[float]:
    """For each context: the fastest FlashAttention-3's time over ours."""
    for context in dict.fromkeys(record["context"] for record in records):
        measured = [r for r in records if r["context"] == context and r.get("us")]
        times = {record["candidate"]: record["us"] for record in measured}
        peers = [us for name, us in times.items() if name.startswith("fa3")]
        if peers and "pageforge" in times:
            yield min(peers) / times["pageforge"]


def sharing(sets: Sequence[ResultSet]) -> Iterator[str]:
    """Beams, samples and forks: bytes against DynamicCache's."""
    rows: list[Row] = []
    for each in sets:
        for record in each.records("sharing", "sharing"):
            rows.append(
                (
                    f"{each.name}: {record['case']}",
                    record["way"],
                    record.get("failure") or mb(record["cache_peak_bytes"]),
                    record.get("dynamic_over"),
                    record.get("pages_shared"),
                    record.get("pages_copied"),
                    record.get("same_tokens"),
                )
            )
    if rows:
        yield "Sequences with a common prompt: the most that the cache took at any step. Models"
        yield "have random weights, in half precision on a GPU: near ties, which roundings decide,"
        yield "make tokens part there (in fp32 they are the same; see the last table)."
        yield ""
        columns = ("", "way", "MB", "DynamicCache over it", "pages shared", "copied", "same tokens")
        yield from table(columns, rows)


def listed(
    what: Callable[[ResultSet], Iterator[Row]],
) -> Callable[[Sequence[ResultSet]], Iterator[str]]:
    """A table of single figures."""

    def write(sets: Sequence[ResultSet]) -> Iterator[str]:
        rows = [(each.name, *row) for each in sets for row in what(each)]
        if rows:
            yield from table(("", "what", "figure"), rows)

    return write


TABLES: Sequence[tuple[str, str | None, Callable[[Sequence[ResultSet]], Iterator[str]]]] = (
    ("Memory", "vram", memory),
    ("A decode step", "latency", latency),
    ("`model.generate`", None, listed(generate)),
    ("Throughput", "throughput", throughput),
    ("The engine", None, listed(engine)),
    ("Kernels", "kernels", kernels),
    ("Sharing", "sharing", sharing),
    ("Pages, and what they hold", None, listed(pages)),
)
"""The title of each part, the question whose lack is told, and what writes the part."""

IN_README = ("Memory", "A decode step", "Throughput", "Kernels")
"""Parts that the README shows as well."""

OF_ANY_MODEL = frozenset({"kernels", "allocator", "parity"})
"""Questions that one folder of a machine answers for all, or for several models at once."""


def block(sets: Sequence[ResultSet], titles: Sequence[str] = IN_README, root: str = "") -> str:
    """Parts as Markdown; nothing without results. `root`: the repository's, for links."""
    if not sets:
        return ""
    lines = [*_about(sets, root)]
    for title, question, write in TABLES:
        if title not in titles:
            continue
        lines += ["", f"### {title}", ""]
        written = list(write(sets))
        missing = [] if question is None else list(_missing(sets, question))
        lines += [*written, *([""] if written and missing else []), *missing]
        if not written and not missing:
            lines += ["Not measured."]
    return "\n".join(lines) + "\n"


def _missing(sets: Sequence[ResultSet], question: str) -> Iterator[str]:
    """Who has no results of a question, and whose failed as a whole."""
    there = [each for each in sets if question in each.files]
    machines = {each.machine for each in there}
    lacking = [
        each.name
        for each in sets
        if each not in there and not (question in OF_ANY_MODEL and each.machine in machines)
    ]
    if lacking:
        yield f"Not measured: {'; '.join(lacking)}."
    for each in there:
        for record in each.records(question, question):
            if record.get("failure") and len(each.files[question].results) == 1:
                yield f"Not measured: {each.name} ({record['failure']})."


def _about(sets: Sequence[ResultSet], root: str) -> Iterator[str]:
    """What was measured on what, and where the files are."""
    rows = []
    for each in sets:
        files = list(each.files.values())
        machines = [file.machine for file in files]
        versions = (_all(m.get(name) for m in machines) for name in ("torch", "transformers"))
        hardware = _all(m.get("gpu") or f"{m.get('cpus')} CPU cores" for m in machines)
        place = f"{root}benchmarks/results/current/{each.machine}/{each.model}"
        commit, day = _all(m.get("commit") for m in machines), _all(f.began[:10] for f in files)
        rows.append((f"[{each.name}]({place})", hardware, *versions, commit, day))
    yield from table(("results", "measured on", "torch", "transformers", "commit", "day"), rows)


def _all(values: Iterable[object]) -> str:
    """The different ones."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def updated(text: str, made: str) -> str:
    """A README's `text` with what was `made` between the markers. Raises ValueError without."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md: expected the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{made}{END}{after}"


def made(sets: Sequence[ResultSet], readme: str) -> dict[Path, str]:
    """Both files as they should be, given the README's text."""
    document = HEAD + block(sets, [title for title, _, _ in TABLES], root="../")
    return {README: updated(readme, block(sets)), DOCUMENT: document}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables of results, from the result files.")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if they are stale")
    check = parser.parse_args().check
    stale = []
    for path, text in made(read_sets(CURRENT), README.read_text(encoding="utf-8")).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        sys.exit(f"{' and '.join(stale)}: stale; run this without --check")


if __name__ == "__main__":
    main()
