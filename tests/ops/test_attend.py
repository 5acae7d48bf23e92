"""`attend`, `attend_with_lse`, `write_and_attend` and `plan_decode` as ops, on the CPU."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import sys
from typing import Any

import pytest
import torch
from tests.ops.attention_cases import RATIOS, TOLERANCE, Step, bits, make_step
from tests.ops.cache_cases import INTERPRETED
from torch import Tensor

from pageforge import ops
from pageforge.errors import ShapeError
from pageforge.ops import reference


def write_and_attend(step: Step, new: tuple[Tensor, Tensor], **more: Any) -> Tensor:
    return ops.write_and_attend(
        *(step.query, *new, step.key_pages, step.value_pages, step.page_table, step.seq_lens),
        **{"scale": step.scale, **step.options, **more},
    )


def options_of(num_heads: int) -> dict[str, Any]:
    return {"softcap": 9.0, "sinks": torch.randn(num_heads), "alibi_slopes": torch.rand(num_heads)}


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", RATIOS, ids=str)
def test_a_decode_step(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for more in ({}, {"window": 9, "starts": [3, 1, 0, 9], **options_of(heads[0])}):
        step = make_step([30, 1, 0, 17], heads=heads, dims=(24, 16), dtype=dtype, **more)
        written = step.store.clone()
        step.check(write_and_attend(step, step.take_newest()))
        assert torch.equal(bits(step.store), bits(written))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("plain", [True, False])
def test_rows_of_any_number_of_queries(plain: bool, dtype: torch.dtype) -> None:
    """And tokens that are no row's, which give 0 (and -inf)."""
    queries, lengths = [3, 1, 0, 5, 1], [30, 9, 12, 5, 1]
    more = {} if plain else {"starts": [0, 2, 0, 1, 0], "window": 7, **options_of(4)}
    # Tokens out of the newest one's window are in an older one's: all are there.
    step = make_step(lengths, dtype=dtype, **{**more, "window": None})
    bounds = torch.tensor([0, *queries]).cumsum(0).int()
    query = torch.randn(12, 4, 16).to(dtype)
    step.options.pop("window", None)
    if "window" in more:
        step.options["window"] = 7
    args = step.key_pages, step.value_pages, step.page_table, step.seq_lens, bounds
    want, want_lse = reference.attend(query.double(), *args, scale=step.scale, **step.options)
    more = {"max_query_len": 5, "scale": step.scale, **step.options}
    out, lse = ops.attend_with_lse(query, *args, **more)
    for got in (out, ops.attend(query, *args, **more)):
        assert got.dtype == dtype
        assert not got.isnan().any() and not got[10:].any()
        assert (got.double() - want).norm() <= TOLERANCE[dtype] * want.norm()
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=10 * TOLERANCE[dtype])
    assert bool(lse[10:].isneginf().all())


def test_a_slice_of_a_page_table() -> None:
    step = make_step([30, 9])
    wide = torch.full((2, 20), 2**30, dtype=torch.int32)
    wide[:, 3 : 3 + step.page_table.shape[1]] = step.page_table
    table = wide[:, 3 : 3 + step.page_table.shape[1]]
    moved = dataclasses.replace(step, page_table=table)
    step.check(write_and_attend(moved, step.take_newest()))


def test_nothing_to_attend_to() -> None:
    step = make_step([9, 3])
    new = step.take_newest()
    none = step.query[:0], step.page_table[:0], step.seq_lens[:0]
    pages = step.key_pages, step.value_pages
    got = ops.attend(
        *(none[0], *pages, *none[1:]), step.cu_query_lens[:1], max_query_len=1, scale=1.0
    )
    assert got.shape == (0, 4, 16)
    got = ops.write_and_attend(none[0], *(part[:0] for part in new), *pages, *none[1:], scale=1.0)
    assert got.shape == (0, 4, 16)
    before = step.store.clone()
    step.seq_lens.zero_()
    step.page_table = step.page_table[:, :0]
    assert not write_and_attend(step, new).any()
    assert torch.equal(bits(step.store), bits(before))


def test_what_is_padding_is_not_written() -> None:
    """A row without tokens, one of which all are left padding, one whose page is page 0."""
    step = make_step([20, 0, 9, 9], starts=[0, 0, 9, 0])
    want = step.store.clone()
    new = step.take_newest()
    step.page_table[3, 1] = 0
    write_and_attend(step, new)
    changed = (bits(step.store) != bits(want)).any(1).nonzero().flatten().tolist()
    assert len(changed) <= 1, "the page from which row 3's newest token was taken"
    assert bool(step.store[0].isnan().all())


def test_on_the_cpu_there_is_nothing_to_plan() -> None:
    step = make_step([9, 3])
    assert ops.plan_decode(step.seq_lens, step.page_table, step.key_pages) is None
    with pytest.raises(ShapeError, match="seq_lens"):
        ops.plan_decode(step.seq_lens.long(), step.page_table, step.key_pages)


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops do what they do on CUDA, in Triton's interpreter. Returns the plans that are made."""
    pytest.importorskip("triton")
    if not INTERPRETED:
        pytest.skip("runs kernels on the CPU, in Triton's interpreter")
    attend_module = sys.modules[ops.attend.__module__]  # the function has the module's name
    made: list[Any] = []
    plan_decode = attend_module.plan.plan_decode

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options)
        return plan_decode(*args, **options)

    monkeypatch.setattr(attend_module, "plans", lambda key_pages: True)
    monkeypatch.setattr(attend_module, "_attend", attend_module._attend_cuda)
    monkeypatch.setattr(attend_module.plan, "plan_decode", counted)
    return made


@pytest.mark.parametrize("queries", [[3, 1, 0, 5, 1], [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_one_plan_serves_all_layers_of_a_mixed_step(
    queries: list[int], window: int | None, kernels_on_the_cpu: list[Any]
) -> None:
    bounds = torch.tensor([0, *queries]).cumsum(0).int()
    step = make_step([30, 9, 12, 5, 60])
    rows = step.page_table, step.seq_lens
    options = {"max_query_len": max(queries), "scale": 0.25, "window": window}
    plan = ops.plan_decode(
        step.seq_lens, step.page_table, step.key_pages, window=window, cu_query_lens=bounds
    )
    for factor in (1.0, -0.5, 2.0):  # layers with K and V of their own
        pages = step.key_pages * factor, step.value_pages * factor
        args = torch.randn(sum(queries), 4, 16), *pages, *rows, bounds
        want, _ = reference.attend(args[0].double(), *args[1:], scale=0.25, window=window)
        kernels_on_the_cpu.clear()
        got = ops.attend(*args, **options, plan=plan)
        assert not kernels_on_the_cpu
        assert (got.double() - want).norm() <= TOLERANCE[torch.float32] * want.norm()
        assert torch.equal(ops.attend(*args, **options), got)
        needed = ops.may_have_single_queries(sum(queries), len(queries), max(queries))
        assert needed == (queries != [2] * 5) == len(kernels_on_the_cpu)


def test_a_plan_for_other_queries_is_refused() -> None:
    """Rows would be left out, or be given another's query."""
    pytest.importorskip("triton")
    step = make_step([9, 3])
    new, bounds = step.take_newest(), torch.tensor([0, 2, 3], dtype=torch.int32)
    other = bounds.clone()
    args = step.key_pages, step.value_pages, step.page_table, step.seq_lens
    query, cut = torch.randn(3, 4, 16), step.cut
    says = "plan: expected one made with the tensor that is passed as cu_query_lens, got one made"
    for plan in (cut(), cut(cu_query_lens=other)):
        with pytest.raises(ShapeError, match=says):
            ops.attend(query, *args, bounds, max_query_len=2, scale=0.25, plan=plan)
    with pytest.raises(ShapeError, match=says):
        write_and_attend(step, new, plan=cut(cu_query_lens=step.cu_query_lens))
    with pytest.raises(ShapeError, match=r"cu_query_lens: expected \[3\] torch.int32, got \[2\]"):
        ops.plan_decode(step.seq_lens, step.page_table, step.key_pages, cu_query_lens=bounds[:2])


@pytest.mark.parametrize("op", ["attend", "write_and_attend"])
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"lengths": [9, 3, 1]}, "num_rows=2"),
        ({"window": 5}, "window=None"),
        ({"heads": (4, 1)}, "num_kv_heads=2"),
        ({"dims": (32, 16)}, "key_dim=16"),
        ({"dtype": torch.float16}, "dtype=torch.float32"),
        ({"spare": 7}, "max_seq_len=24"),
        ({"starts": [1, 0]}, "one made with the tensor that is passed as starts"),
        ({"batch_invariant": True}, "batch_invariant=False"),
    ],
    ids=str,
)
def test_a_plan_made_for_something_else(op: str, other: dict[str, Any], says: str) -> None:
    """It would cut rows where they are not, and give a wrong answer without a word."""
    pytest.importorskip("triton")
    step = make_step([9, 3])
    new = step.take_newest()
    cut = {name: other[name] for name in other.keys() & {"batch_invariant"}}
    made = {"lengths": [9, 3]} | {name: other[name] for name in other.keys() - cut.keys()}
    plan = make_step(**made).cut(**cut)
    before = step.store.clone()
    with pytest.raises(ShapeError, match=f"plan: expected .*{says}.*, got .*; ") as raised:
        if op == "write_and_attend":
            write_and_attend(step, new, plan=plan)
        else:
            ops.attend(
                *(step.query, step.key_pages, step.value_pages, step.page_table, step.seq_lens),
                step.cu_query_lens,
                max_query_len=1,
                scale=step.scale,
                plan=plan,
            )
    assert "\n" not in str(raised.value)
    assert torch.equal(bits(step.store), bits(before)), "nothing was written"
    step.check(write_and_attend(step, new, plan=step.cut()))


# --- what torch knows of them ---------------------------------------------------------------------


@pytest.mark.parametrize("return_lse", [True, False])
def test_attend_as_an_op(return_lse: bool) -> None:
    step = make_step([9, 3])
    step.store.nan_to_num_(0)
    args = step.query, step.key_pages, step.value_pages, step.page_table, step.seq_lens
    options = 0.25, 5, 9.0, torch.randn(4), torch.rand(4), torch.tensor([1, 0]).int()
    torch.library.opcheck(
        torch.ops.pageforge.attend.default,
        (*args, step.cu_query_lens, 1, return_lse, False, None, *options),
    )


@pytest.mark.parametrize("queries", [[4], [4, 1], [3, 3]])
def test_attend_of_several_queries_as_an_op(queries: list[int]) -> None:
    """Dense in any case: compiled code believes what it was told of strides."""
    step = make_step([9] * len(queries))
    step.store.nan_to_num_(0)
    bounds = torch.tensor([0, *queries]).cumsum(0).int()
    args = step.key_pages, step.value_pages, step.page_table, step.seq_lens, bounds
    torch.library.opcheck(
        torch.ops.pageforge.attend.default,
        (torch.randn(sum(queries), 4, 16), *args, 4, False, False, None, 0.25, *[None] * 5),
    )


@pytest.mark.parametrize("plan_table", [None, torch.zeros(9, dtype=torch.int32)])
def test_write_and_attend_as_an_op(plan_table: Tensor | None) -> None:
    step = make_step([9, 3])
    new = step.take_newest()
    step.store.nan_to_num_(0)
    args = step.query, *new, step.key_pages, step.value_pages, step.page_table, step.seq_lens
    torch.library.opcheck(
        torch.ops.pageforge.write_and_attend.default,
        (*args, False, plan_table, 0.25, None, None, None, None, None),
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_compiled_layers_write_to_the_callers_pages() -> None:
    """Views of one tensor, as a pool's layers are; and they make no copy of it."""
    from torch._inductor.utils import run_and_get_code

    pages, layers, heads, page_size, dim = 211, 2, 2, 8, 16
    pool = torch.randn(pages, layers, 2, heads, page_size, dim)
    views = []
    for layer in range(layers):
        size, strides = (pages, heads, page_size, dim), (pool.stride(0), page_size * dim, dim, 1)
        offset = pool.stride(1) * layer
        key_pages = pool.as_strided(size, strides, offset)
        views.append((key_pages, pool.as_strided(size, strides, offset + pool.stride(2))))
    table = (torch.randperm(12).view(3, 4) + 1).int()
    seq_lens = torch.tensor([30, 9, 0], dtype=torch.int32)
    query, (key, value) = torch.randn(3, 4, dim), torch.randn(2, 3, heads, dim)

    def step(query, key, value, views, table, seq_lens):
        for key_pages, value_pages in views:
            query = ops.write_and_attend(
                *(query * 1.5, key, value + 1, key_pages, value_pages, table, seq_lens),
                scale=0.25,
            )
        return query + 1

    before = pool.clone()
    want = step(query, key, value, views, table, seq_lens)
    written = pool.clone()
    assert not torch.equal(written, before)
    pool.copy_(before)
    compiled = torch.compile(step, fullgraph=True)
    got, code = run_and_get_code(compiled, query, key, value, views, table, seq_lens)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(pool, written)
    largest = 0
    for source in code:
        assert ".clone(" not in source
        for sizes in re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", source):
            largest = max(largest, math.prod(int(size) for size in re.findall(r"\d+", sizes)))
    assert 0 < largest < pool.numel() // 10


# --- wrong arguments ------------------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    ("query", lambda t: t[:, :3], r"query: expected \[T, a multiple of 2, 16\], got \[2, 3, 16\]"),
    ("query", lambda t: t[..., :8], r"query: expected .*16\], got \[2, 4, 8\]; as the pages'"),
    ("query", lambda t: t[0], r"query: expected .*, got \[4, 16\]"),
    ("query", lambda t: t.half(), r"query: expected torch.float32, got torch.float16; call .to\("),
    ("query", lambda t: t.mT.contiguous().mT, "query: expected last stride 1, got .*; reshape it"),
    ("key_pages", lambda t: t[0], "key_pages, value_pages: expected .N, Hkv, P, dim"),
    ("key_pages", lambda t: t[:2], r"value_pages: expected \[2, 2, 8, any\] torch.float32"),
    ("key_pages", lambda t: t.mT.contiguous().mT, r"key_pages: expected strides \(any, 128, 16, 1"),
    ("value_pages", lambda t: t.half(), "value_pages: expected .* torch.float32.*, got .*float16"),
    ("value_pages", lambda t: t[:, :1], "value_pages: expected .*; pass what pool.layer"),
    ("page_table", lambda t: t.long(), r"page_table: expected .*int32, got .*int64; call .int\("),
    ("page_table", lambda t: t[0], r"page_table: expected \[S, M\], dense"),
    ("page_table", lambda t: t[:1], r"page_table: expected \[2, 6\] torch.int32, got \[1, 6\]"),
    ("page_table", lambda t: t.mT.contiguous().mT, r"page_table: expected \[S, M\], dense in the"),
    ("page_table", lambda t: t[:, :4], "page_table: expected room for 33 tokens, got 32; pass as"),
    ("seq_lens", lambda t: t.long(), r"seq_lens: expected \[2\] torch.int32, got \[2\] .*int64"),
    ("seq_lens", lambda t: t[:, None], r"seq_lens: expected \[up to 32768\], got \[2, 1\]"),
    ("seq_lens", lambda t: t[:1].expand(2), r"seq_lens: expected stride 1, got \(0,\); call .cont"),
    ("seq_lens", lambda t: t.new_zeros(32769), r"seq_lens: expected \[up to 32768\], got \[32769"),
    ("starts", lambda t: torch.tensor([0, 1]), r"starts: expected \[2\] torch.int32, got .*int64"),
    ("starts", lambda t: torch.tensor([1]).int(), r"starts: expected \[2\] torch.int32, got \[1\]"),
    ("sinks", lambda t: torch.zeros(2), r"sinks: expected \[4\] .*, got \[2\] .*; one for each"),
    ("sinks", lambda t: torch.zeros(8)[::2], r"sinks: expected \[4\] of a floating dtype, contig"),
    ("alibi_slopes", lambda t: torch.zeros(4, 1), r"alibi_slopes: expected \[4\]"),
    ("alibi_slopes", lambda t: torch.zeros(4).int(), r"alibi_slopes: expected .*floating.*int32"),
    ("window", lambda t: 0, "window: expected 1 or more, got 0; a token sees itself at least"),
    ("scale", lambda t: 0.0, r"scale: expected a positive number, got 0.0; 1 / sqrt"),
    ("scale", lambda t: math.nan, "scale: expected a positive number, got nan"),
    ("scale", lambda t: math.inf, "scale: expected a positive number, got inf"),
    ("softcap", lambda t: -3.0, "softcap: expected a positive number, got -3.0; None is no cap"),
]

WRONG_NEW: list[tuple[str, Any, str]] = [
    ("query", lambda t: t[:1], r"query: expected 2 rows, got \[1, 4, 16\]; one query a row"),
    (
        "key",
        lambda t: t[:1],
        r"key: expected \[2, 2, 16\], dense .*, got \[1, 2, 16\] with strides",
    ),
    ("key", lambda t: t.mT.contiguous().mT, r"key: expected \[2, 2, 16\], dense in the last dim"),
    ("value", lambda t: t[:, :1], r"value: expected \[2, 2, 16\], dense .*; reshape it"),
    ("value", lambda t: t.long(), "value: expected a floating dtype, got torch.int64; pass torch"),
]

WRONG_QUERIES: list[tuple[str, Any, str]] = [
    ("cu_query_lens", lambda t: t[:2], r"cu_query_lens: expected \[3\] torch.int32, got \[2\]"),
    ("cu_query_lens", lambda t: t.long(), r"cu_query_lens: expected \[3\] torch.int32, got .*64"),
]


def refuses(call: Any, step: Step, args: dict[str, Any], name: str, change: Any, says: str) -> None:
    """Raises with a message that says name, what was expected, what came, and what to do."""
    before = step.store.clone()
    with pytest.raises(ShapeError, match=says) as raised:
        call(**{**args, name: change(args.get(name))})
    assert re.fullmatch(r"[\w, ]+: expected .+, got .+; .+", str(raised.value))
    assert torch.equal(bits(step.store), bits(before)), "nothing was written"


@pytest.mark.parametrize(("name", "change", "says"), [*WRONG, *WRONG_NEW])
def test_wrong_arguments_of_a_decode_step(name: str, change: Any, says: str) -> None:
    step = make_step([33, 9])
    key, value = step.take_newest()
    names = "query", "key_pages", "value_pages", "page_table", "seq_lens"
    args = {name: getattr(step, name) for name in names}
    args |= {"key": key, "value": value, "scale": 0.25}
    refuses(ops.write_and_attend, step, args, name, change, says)


@pytest.mark.parametrize(("name", "change", "says"), [*WRONG, *WRONG_QUERIES])
def test_wrong_arguments_of_attend(name: str, change: Any, says: str) -> None:
    step = make_step([33, 9])
    names = "query", "key_pages", "value_pages", "page_table", "seq_lens", "cu_query_lens"
    args: dict[str, Any] = {name: getattr(step, name) for name in names}
    args |= {"max_query_len": 2, "scale": 0.25}
    for op in (ops.attend, ops.attend_with_lse):
        refuses(op, step, args, name, change, says)
