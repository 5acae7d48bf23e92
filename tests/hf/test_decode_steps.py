"""Decode steps as CUDA takes them (plans and launches kept from step to step), in the interpreter.

The reference is stock attention with DynamicCache, as in `test_attention.py`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.hf.parity import nan_pool
from tests.hf.test_attention import Both, left_padded, tokens
from tests.hf.tiny_models import tiny
from torch import Tensor

pytest.importorskip("triton")
from pageforge import PagedKVCache, ShapeError, ops
from pageforge.ops import decode, plan
from pageforge.ops.launch import Launcher


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels are used on the CPU; the names of those for which launches were prepared."""
    names: list[str] = []
    real = Launcher.prepare

    def prepare(self: Launcher, *args: object) -> Callable[..., None]:
        names.append(self._kernel.fn.__name__)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "prepare", prepare)
    monkeypatch.setattr(ops, "plans", lambda key_pages: True)
    yield names


def feed(both: Both, ids: Tensor, mask: Tensor | None, start: int, stop: int) -> None:
    for end in range(start + 1, stop + 1):
        both.forward(ids[:, end - 1 : end], None if mask is None else mask[:, :end])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_step_after_step(name: str, prepared: list[str]) -> None:
    """From 16 tokens to 17 a page more is used, a tile more is read, and the tables grow."""
    ids, mask = tokens(2, 19), left_padded(0, 3, length=19)
    with nan_pool(tiny(name)) as pool:
        both = Both(name, pool)
        both.forward(ids[:, :13], mask[:, :13])
        feed(both, ids, mask, 13, 19)
        assert both.paged.num_gathers == 0
        groups = len(pool.geometry.groups)
        assert prepared.count("_plan_kernel") == 2 * groups, "up to 16 tokens, and from then on"
        assert prepared.count("_decode_kernel") == 2 * groups


def test_a_plan_that_needs_more_room_alone(prepared: list[str]) -> None:
    """At 49 tokens a row has a tile more than at 48, and the device's page table is as it was."""
    ids = tokens(1, 50)
    with nan_pool(tiny("llama")) as pool:
        both = Both("llama", pool)
        for start, stop in ((0, 30), (30, 46)):  # the table's columns are doubled: four, then eight
            both.forward(ids[:, start:stop])
        feed(both, ids, None, 46, 48)
        assert prepared.count("_plan_kernel") == 1
        feed(both, ids, None, 48, 50)
        assert prepared.count("_plan_kernel") == 2


@pytest.mark.parametrize("merged_bytes", [decode.MERGED_BYTES, 0])
def test_a_launch_is_saved(
    merged_bytes: int, prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row in five pieces is merged by the decode kernel itself, if they are not large."""
    monkeypatch.setattr(decode, "MERGED_BYTES", merged_bytes)
    ids = tokens(1, 67)
    with nan_pool(tiny("llama")) as pool:
        both = Both("llama", pool)
        both.forward(ids[:, :65])
        feed(both, ids, None, 65, 67)
        assert prepared.count("_decode_kernel") == 1
        assert prepared.count("_merge_kernel") == (merged_bytes == 0)


def test_rows_that_change_between_steps(prepared: list[str]) -> None:
    ids = tokens(3, 16)
    with nan_pool(tiny("llama")) as pool:
        both = Both("llama", pool)
        both.forward(ids[:, :10])
        feed(both, ids, None, 10, 12)
        for cache in (both.dynamic, both.paged):
            cache.reorder_cache(torch.tensor([2, 0, 0]))
        feed(both, ids, None, 12, 14)
        for cache in (both.dynamic, both.paged):
            cache.crop(-2)
        feed(both, ids, None, 12, 14)
        for cache in (both.dynamic, both.paged):
            cache.batch_select_indices(torch.tensor([1]))
        with pytest.raises(ShapeError):
            both.ours(ids[:, 14:15], past_key_values=both.paged)
        feed(both, ids[:1], None, 14, 16)
        assert "_decode_kernel" in prepared


def test_a_fork_and_its_parent_step_by_turns(prepared: list[str]) -> None:
    ids, other = tokens(2, 12), tokens(2, 12, seed=1)
    with nan_pool(tiny("llama")) as pool:
        both = Both("llama", pool)
        both.forward(ids[:, :8])
        feed(both, ids, None, 8, 9)
        (child,) = both.paged.fork()
        for end in range(10, 13):
            both.forward(ids[:, end - 1 : end])
            both.ours(other[:, end - 1 : end], past_key_values=child)
        want = PagedKVCache(pool)
        both.stock(torch.cat([ids[:, :9], other[:, 9:]], 1), past_key_values=want)
        for mine, its in zip(child.layers, want.layers, strict=True):
            torch.testing.assert_close(mine.keys, its.keys, rtol=1e-4, atol=1e-4)


def test_only_one_step_uses_a_plan(prepared: list[str]) -> None:
    """An earlier step that is asked for once more makes a plan of its own."""
    with nan_pool(tiny("llama")) as pool:
        cache = PagedKVCache(pool)
        tiny("llama")(tokens(2, 10), past_key_values=cache)
        batch, (_, key_pages, _) = cache._state.batch, pool.layer(0)
        assert batch is not None

        def lengths(steps: ops.DecodeSteps | None) -> list[int]:
            """What the plan says where rows end."""
            assert steps is not None
            heads = key_pages.shape[1]
            first = plan.HEADER + 2 + 1 + 2 * heads
            runs = steps.plan.table[first : first + 2 * plan.RUN].view(2, plan.RUN)
            return sorted(runs[:, 2].tolist())

        ends = [batch.step(0, 9, 10)]
        batch.append(1)
        ends.append(batch.step(0, 10, 11))
        made = [step.decode(key_pages, None, None) for step in ends]
        assert made[0] is made[1] and lengths(made[1]) == [11, 11]
        again = ends[0].decode(key_pages, None, None)
        assert again is not made[1]
        assert lengths(again) == [10, 10] and lengths(made[1]) == [11, 11]
        assert ends[1].decode(key_pages, None, None) is made[1]
        other = ends[1].decode(key_pages, 4, None)
        assert other is not made[1] and lengths(other) == lengths(made[1])


def test_a_cache_that_was_freed_holds_no_plans(prepared: list[str]) -> None:
    with nan_pool(tiny("llama")) as pool:
        cache = PagedKVCache(pool)
        tiny("llama")(tokens(2, 10), past_key_values=cache)
        batch, (_, key_pages, _) = cache._state.batch, pool.layer(0)
        assert batch is not None
        steps = batch.step(0, 9, 10).decode(key_pages, None, None)
        table = weakref.ref(steps.plan.table) if steps else None
        del steps
        assert table is not None and table() is not None
        gc.disable()
        try:
            cache.free()
            assert table() is None
        finally:
            gc.enable()
