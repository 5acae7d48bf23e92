"""What of Hopper's prefill kernel needs no GPU: when it is used, and how TMA finds a page.

`test_ahead_of_time.py` compiles it, `tests/gpu/test_prefill_cuda.py` runs it; Gluon has no
interpreter.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from pageforge import ops

triton = pytest.importorskip("triton")

from pageforge.ops import prefill  # noqa: E402

hopper = prefill.hopper
needs_gluon = pytest.mark.skipif(hopper is None, reason="no Gluon, or not one the kernel is for")

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def layer(
    num_pages: int = 9,
    num_kv_heads: int = 8,
    page_size: int = 16,
    dim: int = 128,
    dtype: torch.dtype = FP16,
    num_layers: int = 3,
    device: str = "meta",  # tensors without memory
) -> tuple[Tensor, Tensor]:
    """K and V of the middle one of a pool's layers."""
    shape = num_pages, num_layers, 2, num_kv_heads, page_size, dim
    pool = torch.empty(shape, dtype=dtype, device=device)
    return pool[:, num_layers // 2, 0], pool[:, num_layers // 2, 1]


def serves(key_pages: Tensor, value_pages: Tensor, num_heads: int = 32) -> bool:
    query = torch.empty(7, num_heads, key_pages.shape[3], dtype=key_pages.dtype, device="meta")
    return hopper.serves(query, key_pages, value_pages)


@needs_gluon
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"dtype": BF16, "page_size": 8},
        {"page_size": 128, "dim": 64},
        {"num_kv_heads": 1, "num_layers": 1},
    ],
    ids=str,
)
def test_what_it_serves(kind: dict[str, Any]) -> None:
    assert serves(*layer(**kind))


@needs_gluon
@pytest.mark.parametrize(
    "kind",
    [{"dtype": FP32}, {"page_size": 256}, {"page_size": 4}, {"dim": 96}, {"dim": 256}],
    ids=str,
)
def test_what_it_does_not_serve(kind: dict[str, Any]) -> None:
    assert not serves(*layer(**kind))


@needs_gluon
def test_it_serves_no_k_and_v_that_differ() -> None:
    keys, values = layer()
    assert not serves(keys, values.to(BF16))
    assert not serves(keys, values.contiguous())
    assert not serves(keys, layer(dim=64)[1])


@needs_gluon
def test_it_serves_no_group_of_heads_wider_than_a_program() -> None:
    assert serves(*layer(num_kv_heads=1), num_heads=128)
    assert not serves(*layer(num_kv_heads=1), num_heads=129)


@needs_gluon
def test_it_serves_no_pages_that_tma_cannot_find() -> None:
    """Addresses, and distances between pages, that are no multiple of what it counts in."""
    flat = torch.zeros(2 * 9 * 8 * 16 * 128 + 64, dtype=FP16)
    shape, strides = (9, 8, 16, 128), (2 * 8 * 16 * 128, 16 * 128, 128, 1)
    keys = flat.as_strided(shape, strides)
    assert keys.data_ptr() % 16 == 0
    assert serves(keys, keys)
    shifted = flat.as_strided(shape, strides, 4)
    assert not serves(shifted, keys) and not serves(keys, shifted)
    uneven = flat.as_strided(shape, (2 * 8 * 16 * 128 - 64, *strides[1:]))
    assert not serves(uneven, uneven)


@needs_gluon
@pytest.mark.parametrize("dim", [64, 128])
def test_lines_are_counted_in_int32(dim: int) -> None:
    """2^31 lines of 64 dims are 256 GiB; from a page to the next there are 768 here.

    A layer's lines end with those of the last page that are its own.
    """
    most = (2**31 - 1 - 128) // 768 + 1
    assert serves(*layer(num_pages=most, dim=dim))
    assert not serves(*layer(num_pages=most + 1, dim=dim))


@needs_gluon
def test_tma_finds_every_token_of_a_page() -> None:
    """At line `page * page_lines + head * P + offset`, as the kernel asks for it."""
    for pages in layer(page_size=8, dim=64, device="cpu"):
        pages.copy_(torch.arange(pages.numel()).view(pages.shape))
        pool = hopper._describe(pages)
        assert pool.block_shape == [8, 64] and pool.shape[1] == 64
        lines = torch.as_strided(pool.base, pool.shape, pool.strides)
        page_lines = pages.stride(0) // 64
        for page, head, offset in ((0, 0, 0), (3, 5, 7), (8, 7, 7)):
            line = page * page_lines + head * 8 + offset
            assert torch.equal(lines[line], pages[page, head, offset])
        assert line == len(lines) - 1, "what is behind the layer's last line is not the pool's"


@needs_gluon
@pytest.mark.parametrize(
    ("capability", "options", "used"),
    [
        ((9, 0), {}, True),
        ((9, 0), {"window": 9, "starts": torch.zeros(1, dtype=torch.int32)}, True),
        ((9, 0), {"softcap": 5.0}, False),
        ((9, 0), {"sinks": torch.zeros(2)}, False),
        ((9, 0), {"alibi_slopes": torch.zeros(2)}, False),
        ((8, 0), {}, False),
        ((10, 0), {}, False),
        ((12, 0), {}, False),
        (None, {}, False),
    ],
    ids=str,
)
def test_when_it_is_used(
    capability: tuple[int, int] | None,
    options: dict[str, Any],
    used: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = []

    class Plain:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **constants: launched.append("plain")

    monkeypatch.setattr(prefill, "_capability", lambda _: capability)
    monkeypatch.setattr(prefill, "_prefill_kernel", Plain())
    monkeypatch.setattr(hopper, "attend_prefill", lambda *_, **more: launched.append(more))
    keys, values = layer(num_kv_heads=1, dim=64, device="cpu")
    query, ints = torch.zeros(5, 2, 64, dtype=FP16), torch.tensor([5], dtype=torch.int32)
    cu_query_lens = torch.tensor([0, 5], dtype=torch.int32)
    lse = torch.zeros(5, 2)
    prefill.attend_prefill(
        *(query, keys, values, ints[None], ints, cu_query_lens, torch.zeros_like(query)),
        scale=0.5,
        lse=lse,
        min_query_len=2,
        **options,
    )
    more = {"scale": 0.5, "window": None, "starts": None, "lse": lse, "min_query_len": 2}
    assert launched == ([more | options] if used else ["plain"])


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1234"])
def test_another_triton_gets_the_plain_kernel(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    _import_again(monkeypatch)


@pytest.mark.parametrize("name", ["triton.experimental", "triton.experimental.gluon"])
def test_a_triton_without_gluon_gets_the_plain_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    _import_again(monkeypatch)


def _import_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prefill` imported anew has no Hopper kernel, and works."""
    monkeypatch.setattr(ops, "prefill", prefill)  # to be set back
    monkeypatch.delattr(ops, "prefill_hopper", raising=False)
    for name in ("prefill", "prefill_hopper"):
        monkeypatch.delitem(sys.modules, f"pageforge.ops.{name}", raising=False)
    again = importlib.import_module("pageforge.ops.prefill")
    assert again is not prefill
    assert again.hopper is None
