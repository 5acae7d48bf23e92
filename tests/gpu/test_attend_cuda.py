"""The attention ops on a GPU: mixed batches, captured and compiled steps, a pool that grows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.gpu.test_decode_cuda import run_alone
from tests.ops.attention_cases import Step, bits, make_step
from tests.ops.test_prefill import Batch, make_batch, random_options
from torch import Tensor

from pageforge import KVGeometry, PagePool, ops
from pageforge.errors import ShapeError
from pageforge.ops import reference

pytestmark = pytest.mark.gpu

ROWS = [(1, 2000), (300, 700), (1, 1), (0, 40), (0, 0), (17, 17), (1, 129), (2, 1025)]


def write_and_attend(step: Step, new: tuple[Tensor, Tensor], **more: Any) -> Tensor:
    return ops.write_and_attend(
        *(step.query, *new, step.key_pages, step.value_pages, step.page_table, step.seq_lens),
        scale=step.scale,
        **step.options,
        **more,
    )


def attend(batch: Batch, max_query_len: int, **more: Any) -> tuple[Tensor, Tensor]:
    return ops.attend_with_lse(
        *(batch.query, batch.key_pages, batch.value_pages),
        *(batch.page_table, batch.seq_lens, batch.cu_query_lens),
        max_query_len=max_query_len,
        scale=batch.scale,
        **batch.options,
        **more,
    )


# --- any batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("plain", [True, False])
def test_rows_of_one_query_and_of_many(dtype: torch.dtype, plain: bool) -> None:
    """Which two kernels share; tokens that are nobody's give 0, and -inf."""
    options: dict[str, Any] = {}
    if not plain:
        options = random_options(random.Random(3), ROWS, 32, "cuda")
        options |= {"softcap": 20.0, "window": 300}
    batch = make_batch(
        ROWS, heads=(32, 8), dims=(128, 128), page_size=16, dtype=dtype, device="cuda", **options
    )
    served = int(batch.cu_query_lens[-1])
    out, lse = attend(batch, 300)
    assert not out[served:].any() and bool(lse[served:].isneginf().all())
    _check(batch, out, lse)
    plan = ops.plan_decode(
        *(batch.seq_lens, batch.page_table, batch.key_pages),
        **{name: batch.options.get(name) for name in ("window", "starts")},
        cu_query_lens=batch.cu_query_lens,
    )
    for planned in (None, plan, plan, plan):  # one serves all layers
        alone = ops.attend(
            *(batch.query, batch.key_pages, batch.value_pages),
            *(batch.page_table, batch.seq_lens, batch.cu_query_lens),
            max_query_len=512,
            scale=batch.scale,
            plan=planned,
            **batch.options,
        )
        assert torch.equal(alone, out)


def _check(batch: Batch, out: Tensor, lse: Tensor) -> None:
    """`Batch.check` expects tokens that are nobody's as they were before."""
    out, lse = out.clone(), lse.clone()
    served = int(batch.cu_query_lens[-1])
    out[served:] = lse[served:] = 77.0
    batch.check((out, lse))


def test_batch_invariant_rows_of_one_query() -> None:
    """Alone, beside rows of many queries, or in a tensor with room for more."""
    batch = make_batch(
        [(1, 2000), (3, 700), (1, 64)], heads=(8, 2), dims=(64, 64), page_size=16, spare=4,
        dtype=torch.float16, device="cuda",
    )  # fmt: skip
    want, _ = attend(batch, 3, batch_invariant=True)
    for max_query_len in (4, 7):
        again, _ = attend(batch, max_query_len, batch_invariant=True)
        assert torch.equal(again, want)
    for row, token in ((0, 0), (2, 4)):
        for max_query_len in (1, 2):
            got, _ = ops.attend_with_lse(
                *(batch.query[token : token + 1], batch.key_pages, batch.value_pages),
                *(batch.page_table[row : row + 1], batch.seq_lens[row : row + 1]),
                torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
                max_query_len=max_query_len,
                scale=batch.scale,
                batch_invariant=True,
            )
            assert torch.equal(got[0], want[token]), (row, max_query_len)


def test_a_plan_serves_all_layers_and_changes_nothing() -> None:
    step = make_step(
        [3000, 1, 0, 600], device="cuda", heads=(32, 8), dims=(128, 128), page_size=16,
        dtype=torch.bfloat16, window=900,
    )  # fmt: skip
    plan = ops.plan_decode(step.seq_lens, step.page_table, step.key_pages, window=900)
    assert plan is not None
    new = step.take_newest()
    want = write_and_attend(step, new)
    step.check(want)
    for _ in range(3):
        assert torch.equal(write_and_attend(step, new, plan=plan), want)
    got = ops.attend(
        *(step.query, step.key_pages, step.value_pages, step.page_table),
        *(step.seq_lens, step.cu_query_lens),
        max_query_len=1,
        scale=step.scale,
        plan=plan,
        **step.options,
    )
    step.check(got)


def test_rows_longer_than_their_pages_give_nan_and_write_nothing() -> None:
    step = make_step([100, 700, 33], device="cuda", heads=(8, 2), dims=(64, 64), spare=0)
    new = step.take_newest()
    before = step.store.clone()
    step.seq_lens[1] = 705
    got = write_and_attend(step, new)
    step.seq_lens[1] = 0
    assert bool(got[1].isnan().all())
    assert not got[[0, 2]].isnan().any()
    page = step.page_table[1, :88].long()
    assert torch.equal(bits(step.store[page]), bits(before[page]))


def test_no_rows_and_no_pages() -> None:
    step = make_step([9, 3], device="cuda")
    empty = step.query[:0], step.page_table[:0], step.seq_lens[:0]
    got = ops.attend(
        *(empty[0], step.key_pages, step.value_pages, empty[1], empty[2]),
        step.cu_query_lens[:1],
        max_query_len=1,
        scale=1.0,
    )
    assert got.shape == (0, 4, 16)
    new = tuple(part[:0] for part in step.take_newest())
    got = ops.write_and_attend(
        *(empty[0], *new, step.key_pages, step.value_pages, empty[1], empty[2]), scale=1.0
    )
    assert got.shape == (0, 4, 16)
    step.seq_lens.zero_()
    got = ops.attend(
        *(step.query, step.key_pages, step.value_pages, step.page_table[:, :0], step.seq_lens),
        step.cu_query_lens,
        max_query_len=1,
        scale=1.0,
    )
    assert not got.any()


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    def refused(match: str, page_size: int = 16, dims: tuple[int, int] = (64, 64)) -> None:
        step = make_step([40, 9], device="cuda", page_size=page_size, dims=dims)
        new = step.take_newest()
        before = step.store.clone()
        with pytest.raises(ShapeError, match=match):
            write_and_attend(step, new)
        assert torch.equal(bits(step.store), bits(before))

    refused("head dims from 16 to 256, got 264 and 64", dims=(264, 64))
    refused("head dims from 16 to 256, got 64 and 8", dims=(64, 8))
    refused("page size: expected one of .*, got 4", page_size=4)
    refused("page size: expected one of .*, got 24", page_size=24)
    step = make_step([40, 9], device="cuda")
    new = step.take_newest()
    for name in ("query", "page_table", "seq_lens"):
        moved = make_step([40, 9])
        broken = Step(**{**vars(step), name: getattr(moved, name)})
        with pytest.raises(ShapeError, match=f"{name}: expected cuda:0, got cpu"):
            write_and_attend(broken, new)


# --- graphs and compiled code ---------------------------------------------------------------------


def test_a_captured_step_of_several_layers_in_a_pool_that_grows() -> None:
    """Rows grow over page borders, and one becomes empty; only new tokens' slots change."""
    layers, heads, dim, page_size, rows = 3, (32, 8), 128, 16, 4
    geometry = KVGeometry.uniform(
        layers, heads[1], dim, dtype="bfloat16", page_size=page_size, device="cuda"
    )
    pool = PagePool(geometry, max_memory="8GiB")
    pages, views = pool.pages(0), [pool.layer(layer)[1:] for layer in range(layers)]
    tables = [pool.new_table() for _ in range(rows)]
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    query = torch.empty(layers, rows, heads[0], dim, **like)
    key, value = (torch.empty(layers, rows, heads[1], dim, **like) for _ in range(2))
    page_table = torch.zeros(rows, 200, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(rows, dtype=torch.int32, device="cuda")

    def claim(row: int, num_tokens: int) -> None:
        known = set(tables[row].pages())
        pool.append([tables[row]], num_tokens)
        for page in tables[row].pages():
            if page not in known:
                pages[page] = torch.nan
        ids = torch.tensor(tables[row].pages(), dtype=torch.int32, device="cuda")
        page_table[row, : len(ids)] = ids

    def step() -> list[Tensor]:
        plan = ops.plan_decode(seq_lens, page_table, views[0][0])
        return [
            ops.write_and_attend(
                *(query[layer], key[layer], value[layer], *views[layer], page_table, seq_lens),
                scale=dim**-0.5,
                plan=plan,
            )
            for layer in range(layers)
        ]

    step()  # compiles; all rows are empty, so nothing is written
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    lengths = [0] * rows
    first = True
    for number in range(40):
        for row in range(rows):
            if number == 20 and row == 2:  # a finished row
                pool.release([tables[row]])
                tables[row] = pool.new_table()
                lengths[row], page_table[row] = 0, 0
            elif not (number > 20 and row == 2):
                count = [1500, 1, 47, 15][row] if first else 1
                claim(row, count)
                for table_key, table_value in views:
                    token = torch.arange(lengths[row], lengths[row] + count - 1, device="cuda")
                    page = page_table[row].long()[token // page_size]
                    for part in (table_key, table_value):
                        new = torch.randn(len(token), heads[1], dim, device="cuda")
                        part[page, :, token % page_size] = new.bfloat16()
                lengths[row] += count
        first = False
        seq_lens.copy_(torch.tensor(lengths))
        for static in (query, key, value):
            static.normal_()
        owned = torch.tensor([page for table in tables for page in table.pages()], device="cuda")
        before = pages[owned]
        graph.replay()
        after = pages[owned]
        pages[owned] = before
        last = (seq_lens.long() - 1).clamp(min=0)
        slots = page_table.gather(1, (last // page_size)[:, None])[:, 0].long() * page_size
        slots = (slots + last % page_size).where(seq_lens > 0, -1)
        for layer, (key_pages, value_pages) in enumerate(views):
            reference.write_kv(key[layer], value[layer], key_pages, value_pages, slots)
        assert torch.equal(bits(pages[owned]), bits(after))
        if number % 13 == 0 or 15 <= number <= 22:
            for layer, (key_pages, value_pages) in enumerate(views):
                assert not outs[layer].isnan().any()
                want, _ = reference.attend(
                    *(query[layer].double(), key_pages, value_pages, page_table, seq_lens),
                    torch.arange(rows + 1),
                    scale=dim**-0.5,
                )
                error = (outs[layer].double() - want).flatten(1).norm(dim=1)
                size = want.flatten(1).norm(dim=1)
                assert bool((error <= 1.2e-2 * size).all()), (number, layer, error / size)
                assert bool(outs[layer][seq_lens == 0].eq(0).all())
    assert not pages[0].any()
    pool.release(tables)


def test_four_thousand_steps() -> None:
    """Of one graph, each step's K and V made in it: in the end all are there, and seen."""
    steps, rows, layers, heads, dim, page_size = 4000, 3, 2, (8, 2), 64, 16
    like = {"dtype": torch.float16, "device": "cuda"}
    starts = torch.tensor([0, 700, 3000], device="cuda")
    columns = -(-(steps + 3000) // page_size)
    table = (torch.randperm(rows * columns).view(rows, columns) + 1).int().cuda()
    store = torch.full((rows * columns + 1, layers, 2, heads[1], page_size, dim), torch.nan, **like)
    for layer in range(layers):
        for row, count in enumerate(starts.tolist()):
            token = torch.arange(count, device="cuda")
            for part in (store[:, layer, 0], store[:, layer, 1]):
                new = torch.randn(count, heads[1], dim, device="cuda").half()
                part[table[row].long()[token // page_size], :, token % page_size] = new
    seq_lens = starts.int()
    number = torch.zeros(1, dtype=torch.int64, device="cuda")
    new = torch.randn(steps, layers, 2, rows, heads[1], dim, device="cuda").half()
    query = torch.randn(rows, heads[0], dim, **like)
    state = query.clone()

    def step() -> tuple[Tensor, Tensor]:
        seq_lens.add_(1)
        mine = new.index_select(0, number)[0]
        plan = ops.plan_decode(seq_lens, table, store[:, 0, 0])
        out = state.clone()
        for layer in range(layers):
            asked = out
            out = ops.write_and_attend(
                *(asked, *mine[layer], store[:, layer, 0], store[:, layer, 1], table, seq_lens),
                scale=dim**-0.5,
                plan=plan,
            )
        state.copy_(query + out)  # what was seen decides what is asked next
        number.add_(1)
        return asked, out

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        asked, out = step()
    for _ in range(steps - 1):
        graph.replay()
    assert bool(state.isfinite().all())
    assert seq_lens.tolist() == (starts + steps).tolist()
    last = store[:, layers - 1]
    want, _ = reference.attend(
        *(asked.double(), last[:, 0].nan_to_num(0), last[:, 1].nan_to_num(0), table, seq_lens),
        torch.arange(rows + 1),
        scale=dim**-0.5,
    )
    assert bool((out.double() - want).norm() <= 2e-3 * want.norm())
    for layer in range(layers):
        for row, start in enumerate(starts.tolist()):
            token = torch.arange(start, start + steps, device="cuda")
            page = table[row].long()[token // page_size]
            for part in range(2):
                got = store[page, layer, part, :, token % page_size]
                assert torch.equal(got, new[:, layer, part, row])


def test_the_host_waits_for_nothing() -> None:
    batch = make_batch(ROWS, heads=(8, 2), dims=(64, 64), dtype=torch.float16, device="cuda")
    step = make_step([400, 9], heads=(8, 2), dims=(64, 64), dtype=torch.float16, device="cuda")
    new = step.take_newest()

    def everything() -> None:
        attend(batch, 300)
        write_and_attend(step, new)
        ops.plan_decode(step.seq_lens, step.page_table, step.key_pages)

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_layers_write_to_the_callers_pages() -> None:
    """And make no copy of the pool, of which the views of K and V are parts."""
    heads, dim, page_size, rows = (8, 2), 64, 16, 3
    like = {"dtype": torch.float16, "device": "cuda"}
    pool = torch.randn(20_000, 2, 2, heads[1], page_size, dim, **like)  # 328 MB
    views = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(2)]
    table = (torch.randperm(3 * 40).view(3, 40) + 1).int().cuda()
    seq_lens = torch.tensor([600, 17, 1], dtype=torch.int32, device="cuda")
    query = torch.randn(rows, heads[0], dim, **like)
    key, value = (torch.randn(rows, heads[1], dim, **like) for _ in range(2))

    plan = ops.plan_decode(seq_lens, table, views[0][0])  # once a step, before what is compiled

    def step(query, key, value, views, table, seq_lens):
        for key_pages, value_pages in views:
            query = ops.write_and_attend(
                *(query * 1.5, key, value + 1, key_pages, value_pages, table, seq_lens),
                scale=0.125,
                plan=plan,
            )
        return query

    before = pool.clone()
    want = step(query, key, value, views, table, seq_lens)
    written = pool.clone()
    assert not torch.equal(written, before)
    pool.copy_(before)
    compiled = torch.compile(step, fullgraph=True)
    compiled(query, key, value, views, table, seq_lens)
    pool.copy_(before)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = compiled(query, key, value, views, table, seq_lens)
    assert torch.cuda.max_memory_allocated() - held < 20 << 20
    assert torch.equal(pool, written)
    assert (got - want).norm() <= 2e-3 * want.norm()


# --- memory ---------------------------------------------------------------------------------------

ELASTIC = """
import torch
from pageforge import KVGeometry, PagePool, ops
from pageforge.ops import reference

geometry = KVGeometry.uniform(2, 8, 128, dtype="bfloat16", page_size=256, device="cuda")
pool = PagePool(geometry, max_memory="8GiB")
tables = [pool.new_table() for _ in range(3)]
for table, count in zip(tables, (700, 256, 1)):
    pool.append([table], count)
    for page in table.pages():
        pool.pages(0)[page] = torch.nan
assert pool.stats().bytes_mapped < 64 << 20
_, key_pages, value_pages = pool.layer(1)
rows = [table.pages() + [0] * (20 - len(table.pages())) for table in tables]
page_table = torch.tensor([*rows, [0] * 20], dtype=torch.int32, device="cuda")
seq_lens = torch.tensor([700, 256, 1, 0], dtype=torch.int32, device="cuda")
like = {"dtype": torch.bfloat16, "device": "cuda"}
for row, count in enumerate((699, 255, 0)):
    token = torch.arange(count, device="cuda")
    for part in (key_pages, value_pages):
        part[page_table[row].long()[token // 256], :, token % 256] = torch.randn(
            count, 8, 128, **like)
query = torch.randn(4, 32, 128, **like)
key, value = (torch.randn(4, 8, 128, **like) for _ in range(2))
cu = torch.arange(5, dtype=torch.int32, device="cuda")
out = ops.write_and_attend(
    query, key, value, key_pages, value_pages, page_table, seq_lens, scale=0.1)
again = ops.attend(
    query, key_pages, value_pages, page_table, seq_lens, cu, max_query_len=1, scale=0.1)
torch.cuda.synchronize()
want, _ = reference.attend(
    query.double(), key_pages, value_pages, page_table, seq_lens, cu, scale=0.1)
for got in (out, again):
    assert not got.isnan().any() and not got[3].any()
    assert (got.double() - want).norm() <= 1.2e-2 * want.norm()
print("all is well")
"""


def test_pages_that_nobody_holds_have_no_memory() -> None:
    """In a pool that maps only what is claimed a stray access ends the process."""
    said = run_alone(ELASTIC)
    assert "all is well" in said, said
