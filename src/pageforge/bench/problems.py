"""Attention problems over shuffled pages, their bytes, and the reference's answer to them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pageforge.geometry import ELEMENT_SIZE, ceil_div, pages_for
from pageforge.ops import reference

COLD_BYTES = 600_000_000
"""Bytes of K/V that are read before the same ones come again: ten times an H200's L2."""

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Norm-wise relative error against float64 that still counts as right, of each row."""

CHECKED_ROWS = 3


@dataclass(frozen=True)
class Heads:
    """One attention layer's heads, and how many such layers share a step's plan."""

    query: int
    kv: int
    dim: int
    layers: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} D{self.dim}"


HEADS = (
    Heads(12, 12, 64, layers=12),  # GPT-2 124M
    Heads(32, 8, 128, layers=32),  # Llama 8B
    Heads(9, 3, 64, layers=30),  # SmolLM2-135M
    Heads(8, 1, 128, layers=80),  # Llama 70B, one of eight tensor-parallel ranks
)

SHAPES = {
    "1x1k": (1, 1024),
    "1x8k": (1, 8192),
    "1x32k": (1, 32768),
    "8x4k": (8, 4096),
    "8x32k": (8, 32768),
    "32x512": (32, 512),
    "32x4k": (32, 4096),
    "128x1k": (128, 1024),
    "256x512": (256, 512),
    "64x8k": (64, 8192),
}
"""Rows and context of the decode steps that are measured."""


def kv_bytes(lengths: Sequence[int], heads: Heads, dtype: torch.dtype) -> int:
    """Bytes of K and V that one layer must read."""
    return 2 * sum(lengths) * heads.kv * heads.dim * element_size(dtype)


def element_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return ELEMENT_SIZE[str(dtype).removeprefix("torch.")]


def zipf_lengths(rows: int, total: int, seed: int = 0) -> list[int]:
    """`rows` lengths of about `total` tokens together, the k-th longest as 1/k, in random order."""
    weights = [1 / rank for rank in range(1, rows + 1)]
    lengths = [max(1, round(total * weight / sum(weights))) for weight in weights]
    random.Random(seed).shuffle(lengths)
    return lengths


@dataclass(frozen=True)
class Rotation:
    """Which K/V each call of a run reads, so that none is in a cache any more.

    A run is `sets` decode steps of `layers` calls. Every set has pages of its own, and `buffers`
    different layers, which the calls take in turn: large shapes do with few.
    """

    sets: int
    buffers: int
    layers: int

    @classmethod
    def of(cls, layer_bytes: int, layers: int, cold_bytes: int) -> Rotation:
        """Enough different K/V to be `cold_bytes`, and two at least."""
        different = max(2, ceil_div(cold_bytes, layer_bytes))
        return cls(ceil_div(different, layers), min(different, layers), layers)

    @property
    def calls(self) -> int:
        """Calls of a run."""
        return self.sets * self.layers

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Each step's set, and the buffer of each of its calls."""
        for index in range(self.sets):
            yield index, [layer % self.buffers for layer in range(self.layers)]

    @property
    def last_buffer(self) -> int:
        """The buffer of a run's last call, which is one of the last set."""
        return (self.layers - 1) % self.buffers


@dataclass(frozen=True)
class Problem:
    """One decode step: `lengths` tokens a row, the newest included."""

    heads: Heads
    lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cold_bytes: int = COLD_BYTES

    @property
    def bytes(self) -> int:
        """Bytes of K and V of a layer: what a call cannot do without reading."""
        return kv_bytes(self.lengths, self.heads, self.dtype)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.heads.dim**-0.5

    @cached_property
    def rotation(self) -> Rotation:
        """How a run goes through the K/V."""
        return Rotation.of(self.bytes, self.heads.layers, self.cold_bytes)

    @cached_property
    def seq_lens(self) -> Tensor:
        """`[S]` int32."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    @cached_property
    def query(self) -> Tensor:
        """`[S, Hq, D]`."""
        return self.random(len(self.lengths), self.heads.query, self.heads.dim)

    @cached_property
    def new_key(self) -> Tensor:
        """`[S, Hkv, D]`."""
        return self.random(len(self.lengths), self.heads.kv, self.heads.dim)

    @cached_property
    def new_value(self) -> Tensor:
        """`[S, Hkv, D]`."""
        return self.random(len(self.lengths), self.heads.kv, self.heads.dim)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        for part in tensor.view(-1).split(1 << 30):
            part.normal_()
        return tensor

    @property
    def checked(self) -> list[int]:
        """The rows whose output is compared: the longest, the first, the last."""
        longest = max(range(len(self.lengths)), key=lambda row: self.lengths[row])
        return sorted({longest, 0, len(self.lengths) - 1})[:CHECKED_ROWS]

    def page_table(self, page_size: int, first_page: int) -> Tensor:
        """`[S, M]` int32: pages of random order from `first_page` on, 0 beyond a row's end."""
        counts = [pages_for(length, page_size) for length in self.lengths]
        ids = (torch.randperm(sum(counts), device=self.device) + first_page).int()
        rows = ids.split(counts)
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    def error(
        self, output: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor
    ) -> float:
        """Of `output [S, Hq, D]` over `key_pages`, `value_pages [N, Hkv, P, D]`; worst row."""
        rows = torch.tensor(self.checked, device=self.device)
        want = oracle(
            self.query[rows],
            key_pages,
            value_pages,
            page_table[rows],
            self.seq_lens[rows],
            self.scale,
        )
        return relative_error(output[rows], want)


class PagedKV:
    """The K/V of a problem in the product's own layout, a pool as `PagePool` has it."""

    def __init__(self, problem: Problem, page_size: int):
        rotation, heads = problem.rotation, problem.heads
        num_pages = sum(pages_for(length, page_size) for length in problem.lengths)
        self.pool = problem.random(
            1 + rotation.sets * num_pages, rotation.buffers, 2, heads.kv, page_size, heads.dim
        )
        self.pool[0] = torch.nan  # the padding page is read by nobody
        self.page_tables = [
            problem.page_table(page_size, 1 + index * num_pages) for index in range(rotation.sets)
        ]

    def layer(self, buffer: int) -> tuple[Tensor, Tensor]:
        """Key pages and value pages, `[N, Hkv, P, D]`."""
        return self.pool[:, buffer, 0], self.pool[:, buffer, 1]


def oracle(
    query: Tensor,  # [R, Hq, D]
    key_pages: Tensor,  # [N, Hkv, P, D]
    value_pages: Tensor,  # [N, Hkv, P, D]
    page_table: Tensor,  # [R, M]
    seq_lens: Tensor,  # [R]
    scale: float,
) -> Tensor:  # [R, Hq, D] float64
    """The reference's answer for single queries, in float64."""
    bounds = torch.arange(len(query) + 1)
    out, _ = reference.attend(
        query.double(), key_pages, value_pages, page_table, seq_lens, bounds, scale=scale
    )
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """`||got - want|| / ||want||` of the worst row; NaN where anything is NaN."""
    difference = (got.double() - want).flatten(1).norm(dim=1)
    return float((difference / want.flatten(1).norm(dim=1)).max())
