"""Many queries a row: chunked prefill beside FlashAttention-3, and mixed batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pageforge import ops
from pageforge.bench.context import Bench, best
from pageforge.bench.harness import Candidate, measure
from pageforge.bench.peers import FA3, fa3_attend
from pageforge.bench.problems import (
    TOLERANCE,
    Heads,
    PagedKV,
    Problem,
    oracle,
    relative_error,
)
from pageforge.bench.report import table
from pageforge.geometry import ceil_div

CHUNK = 2048
CONTEXTS = (0, 2048, 8192, 16384, 32768)
HEADS = Heads(32, 8, 128, layers=8)
"""Llama 8B's; `layers`: calls of a run. The chunk is bound by arithmetic, not by memory."""

DTYPE = torch.bfloat16
PAGE_SIZE = 16
FA3_PAGE_SIZES = (16, 128, 256)

MIXED = ([4096] * 64, 2048, 8192)
"""Decode rows by their contexts, and one row's queries and the context before them."""


@dataclass(frozen=True)
class Ragged:
    """Rows of several queries over a problem's K/V; a row's queries are its last tokens."""

    problem: Problem
    query_lens: tuple[int, ...]

    @cached_property
    def cu_query_lens(self) -> Tensor:
        """`[S + 1]` int32."""
        lens = torch.tensor([0, *self.query_lens], device=self.problem.device)
        return lens.cumsum(0).int()

    @cached_property
    def query(self) -> Tensor:
        """`[T, Hq, D]`."""
        heads = self.problem.heads
        return self.problem.random(sum(self.query_lens), heads.query, heads.dim)

    @property
    def flops(self) -> int:
        """Of the two matrix products over what each query sees."""
        heads = self.problem.heads
        seen = sum(
            queries * (length - queries) + queries * (queries + 1) // 2
            for length, queries in zip(self.problem.lengths, self.query_lens, strict=True)
        )
        return 4 * heads.query * heads.dim * seen

    def checked(self) -> tuple[Tensor, Tensor, Tensor]:
        """(index, row, K/V length seen) of a few queries: each row's first, middle and last."""
        triples = []
        start = 0
        for row, (length, queries) in enumerate(
            zip(self.problem.lengths, self.query_lens, strict=True)
        ):
            if row in (0, len(self.query_lens) - 1):
                for query in sorted({0, queries // 2, queries - 1}):
                    triples.append((start + query, row, length - queries + query + 1))
            start += queries
        index, rows, seen = torch.tensor(triples, device=self.problem.device).T
        return index, rows, seen.int()

    def error(
        self, output: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor
    ) -> float:
        """Of `output [T, Hq, D]`: a query is a decode step of a row that ends with it."""
        index, rows, seen = self.checked()
        want = oracle(
            self.query[index], key_pages, value_pages, page_table[rows], seen, self.problem.scale
        )
        return relative_error(output[index], want)


def prefill(bench: Bench) -> None:
    """A chunk on each context beside FlashAttention-3; then a mixed batch and its parts."""
    rows = []
    for context in CONTEXTS:
        if bench.budget.allows(f"prefill {CHUNK} on {context}"):
            rows.append(_chunk(bench, CHUNK, context))
    columns = ("prefill", "us", "TFLOP/s", "fa3 us", "fa3 TFLOP/s", "share of fa3", "fa3 best")
    bench.console.print(table(f"prefill, {HEADS}, bfloat16, page 16, causal flops", columns, rows))
    if bench.budget.allows("mixed batch"):
        _mixed(bench, *MIXED)
    bench.console.print()


def _chunk(bench: Bench, chunk: int, context: int) -> tuple[Any, ...]:
    problem = Problem(HEADS, (context + chunk,), DTYPE, bench.device, bench.cold_bytes)
    ragged = Ragged(problem, (chunk,))
    builders: dict[str, Callable[[], Candidate]] = {"pageforge": partial(attend, ragged)}
    for page_size in FA3_PAGE_SIZES:
        builders[f"fa3 p{page_size}"] = partial(_fa3_chunk, ragged, page_size)
    timings = measure(builders, bench.device, repeats=bench.repeats, graph=False)
    case = {"heads": str(HEADS), "chunk": chunk, "context": context, "flops": ragged.flops}
    for name, timing in timings.items():
        bench.note("prefill", case, name, timing)
    fa3_name, fa3 = best(timings, "fa3")
    mine = timings["pageforge"]
    return (
        f"{chunk} on {context}",
        mine.us,
        ragged.flops / mine.us / 1e6,
        None if fa3 is None else fa3.us,
        None if fa3 is None else ragged.flops / fa3.us / 1e6,
        None if fa3 is None else fa3.us / mine.us,
        fa3_name,
    )


def attend(ragged: Ragged) -> Candidate:
    """`ops.attend` in every layer, as the product calls it: eagerly, without a graph."""
    problem = ragged.problem
    kv, rotation = PagedKV(problem, PAGE_SIZE), problem.rotation

    def run() -> Tensor:
        for index, buffers in rotation.steps():
            for buffer in buffers:
                out = ops.attend(
                    ragged.query,
                    *kv.layer(buffer),
                    kv.page_tables[index],
                    problem.seq_lens,
                    ragged.cu_query_lens,
                    max_query_len=max(ragged.query_lens),
                    scale=problem.scale,
                )
        return out

    def error(output: Tensor) -> float:
        return ragged.error(output, *kv.layer(rotation.last_buffer), kv.page_tables[-1])

    return Candidate(run, rotation.calls, error, TOLERANCE[problem.dtype])


def _fa3_chunk(ragged: Ragged, page_size: int) -> Candidate:
    module = importlib.import_module(FA3)
    problem = ragged.problem
    rotation, heads = problem.rotation, problem.heads
    tokens = ceil_div(problem.lengths[0], page_size) * page_size
    kv = problem.random(
        rotation.sets, rotation.buffers, 2, tokens // page_size, page_size, heads.kv, heads.dim
    )
    page_table = problem.page_table(page_size, 0)

    def run() -> Tensor:
        for index, buffers in rotation.steps():
            for buffer in buffers:
                out = fa3_attend(
                    module,
                    ragged.query[None],
                    (kv[index, buffer, 0], kv[index, buffer, 1]),
                    cache_seqlens=problem.seq_lens,
                    page_table=page_table,
                    softmax_scale=problem.scale,
                )
        return out[0]

    def error(output: Tensor) -> float:
        key, value = (part.transpose(1, 2) for part in kv[-1, rotation.last_buffer])
        return ragged.error(output, key, value, page_table)

    return Candidate(run, rotation.calls, error, TOLERANCE[problem.dtype])


def _mixed(bench: Bench, decode_lens: Sequence[int], chunk: int, context: int) -> None:
    """Decode rows and a chunk in one call, against a call for each."""

    def batch(lengths: Sequence[int], query_lens: Sequence[int]) -> Ragged:
        problem = Problem(HEADS, tuple(lengths), DTYPE, bench.device, bench.cold_bytes)
        return Ragged(problem, tuple(query_lens))

    ones = [1] * len(decode_lens)
    batches = {
        "pageforge mixed": batch([*decode_lens, context + chunk], [*ones, chunk]),
        "pageforge decode part": batch(decode_lens, ones),
        "pageforge prefill part": batch([context + chunk], [chunk]),
    }
    timings = measure(
        {name: partial(attend, ragged) for name, ragged in batches.items()},
        bench.device,
        repeats=bench.repeats,
        graph=False,
    )
    case = {"heads": str(HEADS), "decode_rows": len(ones), "chunk": chunk, "context": context}
    for name, timing in timings.items():
        bench.note("mixed", case, name, timing)
    mixed, decode_part, prefill_part = (timing.us for timing in timings.values())
    found = bench.report.add(
        section="mixed summary", **case, mixed_over_parts=mixed / (decode_part + prefill_part)
    )
    bench.console.print(
        f"mixed batch, {len(ones)} decode rows and {chunk} queries on {context}: {mixed:.0f} us, "
        f"parts {decode_part:.0f} + {prefill_part:.0f} us, ratio {found['mixed_over_parts']:.3f}"
    )
