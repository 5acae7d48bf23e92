"""The attention that ours is measured beside, each over K/V in the layout that it likes best."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pageforge.bench.harness import Builders, Candidate
from pageforge.bench.problems import (
    TOLERANCE,
    PagedKV,
    Problem,
    oracle,
    relative_error,
)
from pageforge.geometry import ceil_div

FA3, FLASHINFER = "flash_attn_interface", "flashinfer"
"""Modules that may be missing."""

FA3_PAGE_SIZES = (16, 64, 256)

FLASHINFER_WORKSPACE = 256 << 20
"""Bytes, for the partial results of split rows."""

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@contextlib.contextmanager
def wheels(folder: Path | None) -> Iterator[list[str]]:
    """Make the wheels in `folder` importable, unpacked beside it all, without pip.

    Yields their names. Raises OSError where there are none.
    """
    if folder is None:
        yield []
        return
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise FileNotFoundError(
            f"--peer-wheels: expected *.whl files in {folder}, got none; `pip download --no-deps` "
            f"puts them there"
        )
    with tempfile.TemporaryDirectory(prefix="pageforge-peers-") as unpacked:
        for wheel in found:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        sys.path.insert(0, unpacked)
        try:
            yield [wheel.name for wheel in found]
        finally:
            sys.path.remove(unpacked)


def decode_peers(problem: Problem, ours: PagedKV) -> Builders:
    """Every peer for one decode step. Contiguous SDPA only where all rows are of one length."""
    builders: dict[str, Callable[[], Candidate]] = {}
    fa3 = _Lazy(lambda: TokenMajorKV(problem))
    for page_size in FA3_PAGE_SIZES:
        for planned in (False, True):
            name = f"fa3 p{page_size}{' planned' if planned else ''}"
            builders[name] = partial(_fa3_decode, problem, fa3, page_size, planned)
    for matrix_units in (True, False):
        name = f"flashinfer{' tc' if matrix_units else ''}"
        builders[name] = partial(_flashinfer_decode, problem, ours, matrix_units)
    if len(set(problem.lengths)) == 1:
        dense = _Lazy(lambda: DenseKV(problem))
        for name, backend in SDPA_BACKENDS.items():
            builders[f"sdpa {name}"] = partial(_sdpa_decode, problem, dense, backend)
    return builders


class _Lazy:
    """Made when first asked for, and shared: a peer that is absent costs no memory."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._made: Any = None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


class TokenMajorKV:
    """`[set, buffer, K or V, token, head, dim]`: pages of any size, heads inside a token."""

    def __init__(self, problem: Problem):
        rotation, heads = problem.rotation, problem.heads
        largest = max(FA3_PAGE_SIZES)
        self.tokens = sum(ceil_div(length, largest) * largest for length in problem.lengths)
        self.kv = problem.random(
            rotation.sets, rotation.buffers, 2, self.tokens, heads.kv, heads.dim
        )

    def pages(self, index: int, buffer: int, page_size: int) -> tuple[Tensor, Tensor]:
        """K and V `[N, P, Hkv, D]` of a set's layer."""
        key, value = self.kv[index, buffer].unflatten(1, (-1, page_size))
        return key, value


class DenseKV:
    """`[set, buffer, K or V, S, Hkv, T, D]`, as DynamicCache would hold it."""

    def __init__(self, problem: Problem):
        rotation, heads = problem.rotation, problem.heads
        self.kv = problem.random(
            rotation.sets,
            rotation.buffers,
            2,
            len(problem.lengths),
            heads.kv,
            problem.lengths[0],
            heads.dim,
        )


def fa3_attend(module: Any, query: Tensor, pages: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """FlashAttention-3 over pages; `query [S, queries, Hq, D]`, as is the result."""
    out: Tensor = module.flash_attn_with_kvcache(query, *pages, causal=True, **options)
    return out


def _fa3_decode(
    problem: Problem, kv: Callable[[], TokenMajorKV], page_size: int, planned: bool
) -> Candidate:
    """Reading alone. `planned`: its scheduler's metadata made once a step, as our plan is."""
    module = importlib.import_module(FA3)
    source, heads, rotation = kv(), problem.heads, problem.rotation
    tables = [problem.page_table(page_size, 0) for _ in range(rotation.sets)]
    query = problem.query[:, None]

    def metadata(table: Tensor) -> Tensor | None:
        if not planned:
            return None
        made: Tensor = module.get_scheduler_metadata(
            len(problem.lengths),
            1,
            table.shape[1] * page_size,
            heads.query,
            heads.kv,
            heads.dim,
            problem.seq_lens,
            qkv_dtype=problem.dtype,
            page_size=page_size,
            causal=True,
        )
        return made

    def run() -> Tensor:
        for index, buffers in rotation.steps():
            plan = metadata(tables[index])
            for buffer in buffers:
                out = fa3_attend(
                    module,
                    query,
                    source.pages(index, buffer, page_size),
                    cache_seqlens=problem.seq_lens,
                    page_table=tables[index],
                    softmax_scale=problem.scale,
                    scheduler_metadata=plan,
                )
        return out

    def error(output: Tensor) -> float:
        pages = source.pages(rotation.sets - 1, rotation.last_buffer, page_size)
        key, value = (part.transpose(1, 2) for part in pages)
        return problem.error(output[:, 0], key, value, tables[-1])

    return Candidate(run, rotation.calls, error, TOLERANCE[problem.dtype])


def _flashinfer_decode(problem: Problem, ours: PagedKV, matrix_units: bool) -> Candidate:
    """Over our own pages. Its plan is made on the host, once, and not timed."""
    module = importlib.import_module(FLASHINFER)
    heads, rotation, page_size = problem.heads, problem.rotation, ours.pool.shape[4]
    pages = (problem.seq_lens.long() + page_size - 1) // page_size
    bounds = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int()
    last = ((problem.seq_lens - 1) % page_size + 1).int()
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=problem.device)
    wrappers = []
    for table in ours.page_tables:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=matrix_units
        )
        wrapper.plan(
            bounds,
            torch.cat([row[:count] for row, count in zip(table, pages.tolist(), strict=True)]),
            last,
            heads.query,
            heads.kv,
            heads.dim,
            page_size,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
            sm_scale=problem.scale,
        )
        wrappers.append(wrapper)

    def run() -> Tensor:
        for index, buffers in rotation.steps():
            for buffer in buffers:
                out = wrappers[index].run(problem.query, ours.layer(buffer))
        return out

    def error(output: Tensor) -> float:
        return problem.error(output, *ours.layer(rotation.last_buffer), ours.page_tables[-1])

    return Candidate(run, rotation.calls, error, TOLERANCE[problem.dtype])


def _sdpa_decode(problem: Problem, kv: Callable[[], DenseKV], backend: SDPBackend) -> Candidate:
    """The queries of a KV head stand as a sequence of their own, so that K/V are read once."""
    source, heads, rotation = kv(), problem.heads, problem.rotation
    query = problem.query.view(len(problem.lengths), heads.kv, -1, heads.dim)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            for index, buffers in rotation.steps():
                for buffer in buffers:
                    key, value = source.kv[index, buffer]
                    out = scaled_dot_product_attention(query, key, value, scale=problem.scale)
        return out

    def error(output: Tensor) -> float:
        rows = torch.tensor(problem.checked, device=problem.device)
        # A row of the dense cache is one page of all its tokens.
        key, value = source.kv[-1, rotation.last_buffer]
        want = oracle(
            problem.query[rows], key, value, rows[:, None], problem.seq_lens[rows], problem.scale
        )
        return relative_error(output.reshape(problem.query.shape)[rows], want)

    return Candidate(run, rotation.calls, error, TOLERANCE[problem.dtype])
