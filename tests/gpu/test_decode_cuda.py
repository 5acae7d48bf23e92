"""The decode kernels on a GPU: against the reference in float64 and beside torch's attention."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ops.attention_cases import Step, bits, make_step
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

decode = pytest.importorskip("pageforge.ops.decode", reason="needs triton")

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

KINDS: list[dict[str, Any]] = [  # every ratio of heads, head dim, page size and dtype
    {"heads": (12, 12), "dims": (64, 64), "page_size": 16, "dtype": FP16},
    {"heads": (32, 8), "dims": (128, 128), "page_size": 16, "dtype": BF16},
    {"heads": (28, 4), "dims": (128, 128), "page_size": 64, "dtype": FP16},
    {"heads": (9, 3), "dims": (64, 64), "page_size": 8, "dtype": FP32},
    {"heads": (8, 1), "dims": (256, 256), "page_size": 256, "dtype": BF16},
    {"heads": (12, 2), "dims": (112, 112), "page_size": 32, "dtype": BF16},
    {"heads": (24, 1), "dims": (80, 40), "page_size": 128, "dtype": FP16},
    {"heads": (32, 8), "dims": (96, 128), "page_size": 16, "dtype": FP32},
    {"heads": (8, 8), "dims": (16, 256), "page_size": 16, "dtype": FP16},
]


def name_of(kind: dict[str, Any]) -> str:
    (queries, keys), (key_dim, value_dim) = kind["heads"], kind["dims"]
    return f"{queries}/{keys}-{key_dim}/{value_dim}-{kind['page_size']}-{kind['dtype']}"


@pytest.fixture(autouse=True)
def _dirty_memory() -> Iterator[None]:
    """What torch hands out, to plans and workspaces too, is full of NaN."""
    sizes = [size << 8 for size in (1, 2, 4, 16, 64, 256, 1024, 2048)] + [20 << 20, 200 << 20]
    held = [torch.full((size // 4,), torch.nan, device="cuda") for size in sizes for _ in range(3)]
    del held
    yield


# --- right for any batch --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_plain(kind: dict[str, Any]) -> None:
    """Rows from nothing to thousands of tokens, and keys at every edge that share the softmax."""
    edges = [0, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 2047, 2048, 4094, 4095]
    step = make_step(
        [4096, 1, 0, 2049, 257, 64, 65, 700], device="cuda", spikes=edges, spare=2, **kind
    )
    step.check(*step.run())
    for lengths in ([4096, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 3000]):
        step = make_step(lengths, device="cuda", spikes=edges, spare=2, **kind)
        step.check(*step.run())


@pytest.mark.parametrize("kind", [KINDS[n] for n in (0, 1, 3, 6)], ids=name_of)
def test_everything_at_once(kind: dict[str, Any]) -> None:
    """Softcap, sinks, slopes, a window, left padding, and a new token that is written and seen."""
    lengths = [3000, 1, 0, 1025, 400, 77, 64, 2000]
    num_heads = kind["heads"][0]
    step = make_step(
        lengths,
        device="cuda",
        window=1024,
        starts=[0, 0, 0, 700, 399, 5, 63, 1500],
        softcap=30.0,
        sinks=torch.randn(num_heads, device="cuda", dtype=kind["dtype"]),
        alibi_slopes=torch.rand(num_heads, device="cuda") * 0.05,
        **kind,
    )
    written = step.store.clone()
    new = step.take_newest()
    step.check(*step.run(new=new))
    assert torch.equal(bits(step.store), bits(written))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 3001])
def test_no_key_is_lost_or_counted_twice(length: int) -> None:
    """Of keys that all weigh the same."""
    for kind in (KINDS[1], KINDS[3]):
        step = make_step([length, 4000, 17], device="cuda", uniform=True, **kind)
        step.check(*step.run())
        step.check(*step.run(new=step.take_newest()))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
def test_windows(window: int) -> None:
    """The first key in the window has the softmax, then the first one that is out of it."""
    for first_seen in (2999 - window, 3000 - window):
        step = make_step(
            [3000, window, window + 1, 2 * window],
            device="cuda",
            window=window,
            spikes=[first_seen],
            **KINDS[1],
        )
        step.check(*step.run())


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids=name_of)
def test_both_ways_to_merge(
    kind: dict[str, Any], batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step([8000, 300, 64, 2000], device="cuda", uniform=True, **kind)
    for most in (0, 1 << 40):
        monkeypatch.setattr(decode, "MERGED_RUNS", most)
        monkeypatch.setattr(decode, "MERGED_BYTES", most)
        plan = step.cut(batch_invariant=batch_invariant)
        table = plan.table.clone()
        assert int(table[0]) > 4
        first = step.run(plan=plan, batch_invariant=batch_invariant)
        step.check(*first)
        assert torch.equal(plan.table, table), "the counters are 0 again"
        for _ in range(20):
            again = step.run(plan=plan, batch_invariant=batch_invariant)
            for one, other in zip(first, again, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[3]], ids=name_of)
def test_no_further_off_than_torchs_attention(kind: dict[str, Any]) -> None:
    """At most twice the error of `scaled_dot_product_attention` on the same numbers."""
    step = make_step([4096, 1000, 37, 2048, 300], device="cuda", **kind)
    got, _ = step.run()
    want, _ = step.want()
    dense = torch.stack([torchs_attention(step, row) for row in range(len(step.seq_lens))])
    ours = (got.double() - want).norm() / want.norm()
    torchs = (dense.double() - want).norm() / want.norm()
    few_ulps = 8 * torch.finfo(torch.float32).eps
    assert ours <= max(2 * torchs, few_ulps), (ours, torchs)


def torchs_attention(step: Step, row: int) -> torch.Tensor:
    page_size = step.key_pages.shape[2]
    token = torch.arange(int(step.seq_lens[row]), device="cuda")
    page = step.page_table[row].long()[token // page_size]
    group = step.query.shape[1] // step.key_pages.shape[1]
    key, value = (
        pages[page, :, token % page_size].repeat_interleave(group, 1).transpose(0, 1)[None]
        for pages in (step.key_pages, step.value_pages)
    )
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return scaled_dot_product_attention(step.query[row, None, :, None], key, value)[0, :, 0]


def test_inputs_of_any_strides_and_alignment() -> None:
    """Slices of a fused projection, transposed views, addresses that no vector load takes."""
    kind = KINDS[0]
    step = make_step([700, 64, 1, 1300], device="cuda", **kind)
    want = step.store.clone()
    new = step.take_newest()
    holes = step.store.clone()

    def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        step.store.copy_(holes)
        again = dataclasses.replace(step, query=query)
        again.check(*again.run(new=(key, value)))
        assert torch.equal(bits(step.store), bits(want))

    def misaligned(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        return flat[1:].view(tensor.shape).copy_(tensor)

    fused = torch.cat([step.query, *new], 1)
    check(*fused.split([12, 12, 12], 1))
    check(*(part.transpose(0, 1).contiguous().transpose(0, 1) for part in (step.query, *new)))
    # One variant of the kernel must not serve two ways of being misaligned.
    for odd in ((True, False, False), (False, True, False), (True,) * 3):
        parts = zip(odd, (step.query, *new), strict=True)
        check(*(misaligned(part) if is_odd else part for is_odd, part in parts))


# --- how it is launched ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids=name_of)
def test_the_quick_launch_does_what_tritons_own_does(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step([3000, 1, 0, 1025, 400, 77, 64, 2000], device="cuda", **kind)
    new = step.take_newest()
    quick = step.run(new=new)

    def prepare(self, variant, device, grid, first, rest, constants, options):
        # Not what it is called with, which may be addresses: those Triton takes for integers.
        return lambda *args: self._kernel[grid](*first, *rest, **constants, **options)

    monkeypatch.setattr(decode.Launcher, "prepare", prepare)
    plain = step.run(new=new)
    for one, other in zip(quick, plain, strict=True):
        assert torch.equal(one, other)


def test_the_host_waits_for_nothing() -> None:
    step = make_step([3000, 1, 0, 1025], device="cuda", **KINDS[1])
    new = step.take_newest()
    step.run(new=new)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step.run(new=new)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check(*got)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_device_that_is_not_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        step = make_step([3000, 1, 0, 1025], device=device, **KINDS[1])
        step.check(*step.run())


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids=name_of)
def test_batch_invariant(kind: dict[str, Any]) -> None:
    """A row's bits are the same alone, among any neighbours, and in a wider page table."""
    lengths = [5000, 64, 700, 2048, 2049]
    step = make_step(lengths, device="cuda", **kind)
    new = step.take_newest()
    want = step.run(new=new, batch_invariant=True)
    step.check(*want)

    def check(rows: list[int], page_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
        part = dataclasses.replace(
            step, query=step.query[rows], page_table=page_table, seq_lens=seq_lens
        )
        got = part.run(new=(new[0][rows], new[1][rows]), batch_invariant=True)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other[rows]), rows

    page_size = kind["page_size"]
    for row, length in enumerate(lengths):
        columns = -(-length // page_size)
        check([row], step.page_table[[row], :columns].contiguous(), step.seq_lens[[row]])
        check([row], step.page_table[[row]], step.seq_lens[[row]])
    for rows in ([3, 1], [2] * 40, [0, 1, 2, 3, 4] * 8):
        check(rows, step.page_table[rows], step.seq_lens[rows])


# --- graphs ---------------------------------------------------------------------------------------


def test_lengths_change_under_a_captured_graph() -> None:
    step = make_step([2000, 3000, 1, 500], device="cuda", **KINDS[0])
    longest = step.seq_lens.clone()
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step.run()
    for lengths in ([1, 1, 1, 1], [2000, 17, 0, 64], [0, 0, 0, 0], [5, 3000, 1, 499]):
        step.seq_lens.copy_(torch.minimum(torch.tensor(lengths).int().cuda(), longest))
        graph.replay()
        step.check(out, lse)


# --- addresses ------------------------------------------------------------------------------------

FAR = """
import torch
from tests.ops.attention_cases import make_step
from pageforge.store import VirtualMemoryStore, is_elastic

device = torch.device("cuda", 0)
if not is_elastic(device):
    print("not elastic")
    raise SystemExit
kind = {"heads": (8, 2), "dims": (128, 128), "page_size": 16, "dtype": torch.float16}
step = make_step([160, 33, 0, 17], device="cuda", spare=9, **kind)
near = step.store
page_bytes = near.stride(0) * 2
edges = [edge // page_bytes for edge in (2**31, 2**32, 2**33)]  # 2**32 elements too
ids = [edge + move for edge in edges for move in (-3, -2, -1, 0, 1, 2)][: len(near) - 1]
assert ids[-1] * page_bytes > 2**33
memory = VirtualMemoryStore((ids[-1] + 2) * page_bytes, device)
memory.map(0, page_bytes)  # a pool's page 0 always has memory, and launches ask for its address
for page in ids:
    memory.map(page * page_bytes, (page + 1) * page_bytes)
far = memory.tensor(torch.float16).view(-1, page_bytes // 2)
new = torch.tensor([0, *ids], device="cuda")
before = near.clone()
want = step.want()
newest = step.take_newest()
for old, page in enumerate(ids, 1):
    far[page] = near[old]
step.page_table = new[step.page_table.long()].int()
half = page_bytes // 4
step.key_pages = far[:, half : half + half // 2].unflatten(1, (2, 16, 128))
step.value_pages = far[:, half + half // 2 :].unflatten(1, (2, 16, 128))
step.want = lambda: want
step.check(*step.run(new=newest))
step.check(*step.run())
for old, page in enumerate(ids, 1):
    assert torch.equal(far[page].view(torch.int16), before[old].view(torch.int16))
torch.cuda.synchronize()
memory.close()
print("all is well")
"""


def test_pages_far_apart_and_no_memory_between_them() -> None:
    """Byte and element offsets past 2^31 and 2^32; a stray access ends the process."""
    said = run_alone(FAR)
    if "not elastic" in said:
        pytest.skip("no virtual memory management here")
    assert "all is well" in said, said


def run_alone(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([f"{ROOT}/src", str(ROOT), *sys.path])},
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr
