"""Attention over pages: `attend`, and `write_and_attend` for one new token a row."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pageforge.errors import ShapeError, expected
from pageforge.geometry import PAGE_SIZES
from pageforge.ops import kernels, plan, reference
from pageforge.ops.checks import check_layer, check_same_device, shape
from pageforge.ops.decode import attend_decode
from pageforge.ops.dense import attend_dense, write_and_attend_dense
from pageforge.ops.library import register
from pageforge.ops.plan import DecodePlan, Purpose
from pageforge.ops.prefill import attend_prefill

HEAD_DIMS = range(16, 257)
"""Of K and V, that the kernels serve."""

MAX_ROWS = 32768
"""A plan is made by one program, which holds a number of each row."""

_RESHAPE = "reshape it, or call .contiguous()"


class Options(NamedTuple):
    """What attention means: the last arguments of both ops, in the order of their schemas."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [Hq]
    alibi_slopes: Tensor | None  # [Hq]
    starts: Tensor | None  # [S] int32


def attend(
    query: Tensor,  # [T, Hq, Dk]
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int32
    seq_lens: Tensor,  # [S] int32, new tokens included
    cu_query_lens: Tensor,  # [S + 1] int32: row s asks with queries cu[s] to cu[s + 1] - 1
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq]
    starts: Tensor | None = None,  # [S] int32: tokens of left padding, which nobody sees
    batch_invariant: bool = False,
    plan: DecodePlan | None = None,
) -> Tensor:  # [T, Hq, Dv]
    """Causal attention of a ragged batch over pages; `reference.attend` says what it means.

    Rows may have one query (decode), several (prefill, or a chunk of it), none, or a mixture, at
    most `max_query_len`. With `batch_invariant` a row's result, to the last bit, does not depend on
    its neighbours. `plan` saves making one: from `plan_decode` with these `cu_query_lens`, or
    without if every row has one query.

    On CUDA the host waits for nothing, and a graph can capture this; lengths are looked at on the
    device alone. A row longer than its pages gives NaN there. Raises ShapeError.
    """
    options = Options(scale, window, softcap, sinks, alibi_slopes, starts)
    _check(query, key_pages, value_pages, page_table, seq_lens, options)
    _check_ints("cu_query_lens", cu_query_lens, (seq_lens.shape[0] + 1,), key_pages)
    if plan is not None and not torch.compiler.is_compiling():  # which it would tie to its sizes
        # A plan for rows of one query each says nothing of their bounds.
        is_for_all = max_query_len == 1 and plan.cu_query_lens is None
        bounds = None if is_for_all else cu_query_lens
        _check_plan(plan, page_table, key_pages, options, batch_invariant, bounds)
    out, _ = _attend(
        query,
        key_pages,
        value_pages,
        page_table,
        seq_lens,
        cu_query_lens,
        max_query_len,
        False,
        batch_invariant,
        None if plan is None else plan.table,  # without one the op makes it itself
        *options,
    )
    return out


def attend_with_lse(
    query: Tensor,  # [T, Hq, Dk]
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int32
    seq_lens: Tensor,  # [S] int32
    cu_query_lens: Tensor,  # [S + 1] int32
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq]
    starts: Tensor | None = None,  # [S] int32
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # [T, Hq, Dv], [T, Hq] float32
    """`attend`, and the natural log-sum-exp of each query's scores (-inf where it sees nothing)."""
    options = Options(scale, window, softcap, sinks, alibi_slopes, starts)
    _check(query, key_pages, value_pages, page_table, seq_lens, options)
    _check_ints("cu_query_lens", cu_query_lens, (seq_lens.shape[0] + 1,), key_pages)
    out, lse = _attend(
        query,
        key_pages,
        value_pages,
        page_table,
        seq_lens,
        cu_query_lens,
        max_query_len,
        True,
        batch_invariant,
        None,
        *options,
    )
    return out, lse


def write_and_attend(
    query: Tensor,  # [S, Hq, Dk]
    key: Tensor,  # [S, Hkv, Dk]
    value: Tensor,  # [S, Hkv, Dv]
    key_pages: Tensor,  # [N, Hkv, P, Dk], written
    value_pages: Tensor,  # [N, Hkv, P, Dv], written
    page_table: Tensor,  # [S, M] int32
    seq_lens: Tensor,  # [S] int32, the new token included
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq]
    starts: Tensor | None = None,  # [S] int32
    batch_invariant: bool = False,
    plan: DecodePlan | None = None,
    check: bool = True,
) -> Tensor:  # [S, Hq, Dv]
    """One decode step of a layer: each row's new token is written, and its query attends.

    `key` and `value` become token `seq_lens - 1` of each row, and the query sees all its tokens. On
    CUDA both happen in one launch. A row of no tokens (padding of a batch) writes nothing and
    gives 0; so does one whose tokens are all left padding. `plan`: what `plan_decode` gave for
    these rows, window, starts and `batch_invariant`; layers share it. K and V of another dtype are
    cast to the pages'. Raises ShapeError, and then nothing was written; without `check`, which a
    caller may leave out who has made sure of it all, it may write anywhere.
    """
    options = Options(scale, window, softcap, sinks, alibi_slopes, starts)
    is_compiling = torch.compiler.is_compiling()
    if check and not is_compiling:  # compiled in, checks would tie what is compiled to its sizes
        _check(query, key_pages, value_pages, page_table, seq_lens, options)
        _check_new(query, key, value, key_pages, value_pages, seq_lens.shape[0])
        if plan is not None:
            _check_plan(plan, page_table, key_pages, options, batch_invariant, None)
    arguments = (
        query,
        key,
        value,
        key_pages,
        value_pages,
        page_table,
        seq_lens,
        batch_invariant,
        None if plan is None else plan.table,  # without one the op makes it itself
        *options,
    )
    if type(query) is not Tensor or is_compiling:
        return _write_and_attend(*arguments)
    # Without torch's dispatcher, which takes the host as long as the kernel takes the device.
    on_cuda = query.is_cuda and kernels.AVAILABLE
    return (_write_and_attend_cuda if on_cuda else _write_and_attend_cpu)(*arguments)


def plan_decode(
    seq_lens: Tensor,  # [S] int32
    page_table: Tensor,  # [S, M] int32
    key_pages: Tensor,  # [N, Hkv, P, Dk] of any layer of the group
    *,
    window: int | None = None,
    starts: Tensor | None = None,  # [S] int32
    cu_query_lens: Tensor | None = None,  # [S + 1] int32
    batch_invariant: bool = False,
) -> DecodePlan | None:
    """How a step's rows are cut into pieces: made once, for all layers of a group with this window.

    `cu_query_lens`: where rows may have several queries, or none; those of one are planned. It
    holds for these `seq_lens`; on the CPU there is nothing to plan. Raises ShapeError.
    """
    _check_rows(page_table, seq_lens, starts, window, key_pages)
    if cu_query_lens is not None:
        _check_ints("cu_query_lens", cu_query_lens, (seq_lens.shape[0] + 1,), key_pages)
    if not plans(key_pages):
        return None
    return _plan(seq_lens, page_table, key_pages, window, starts, cu_query_lens, batch_invariant)


def may_have_single_queries(num_tokens: int, num_rows: int, max_query_len: int) -> bool:
    """Whether `attend` needs a plan: some row may have one query, as far as the host can see.

    With `batch_invariant` it always does.
    """
    return max_query_len == 1 or (num_rows > 1 and num_tokens != num_rows * max_query_len)


def plans(key_pages: Tensor) -> bool:
    """Whether decode steps over these pages are planned: on CUDA, by a kernel."""
    return key_pages.is_cuda and kernels.AVAILABLE


def _check(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    options: Options,
) -> None:
    heads, key_dim, value_dim = check_layer(key_pages, value_pages)
    if query.dim() != 3 or query.shape[2] != key_dim or query.shape[1] % heads:
        want = f"[T, a multiple of {heads}, {key_dim}]"
        raise ShapeError(expected("query", want, shape(query), "as the pages' heads and dim"))
    if query.dtype != key_pages.dtype:
        fix = f"call .to({key_pages.dtype}), or make the pool with the model's dtype"
        raise ShapeError(expected("query", key_pages.dtype, query.dtype, fix))
    if query.stride(2) != 1:
        raise ShapeError(expected("query", "last stride 1", query.stride(), _RESHAPE))
    check_same_device("query", query, key_pages)
    _check_positive("scale", options.scale, "1 / sqrt(head dim), say")
    _check_positive("softcap", options.softcap, "None is no cap")
    _check_rows(page_table, seq_lens, options.starts, options.window, key_pages)
    if options.sinks is not None:
        _check_of_head("sinks", options.sinks, query.shape[1], key_pages)
    if options.alibi_slopes is not None:
        _check_of_head("alibi_slopes", options.alibi_slopes, query.shape[1], key_pages)
    if query.is_cuda:
        page_size = key_pages.shape[2]
        if key_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
            want = f"head dims from {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
            fix = "gather_kv() the pages and attend to them with torch"
            raise ShapeError(expected("key_pages", want, f"{key_dim} and {value_dim}", fix))
        if page_size not in PAGE_SIZES:
            fix = "make the pool with another page_size"
            raise ShapeError(expected("page size", f"one of {PAGE_SIZES}", page_size, fix))
    elif not torch.compiler.is_compiling():
        _check_lengths(seq_lens, page_table, key_pages)


def _check_new(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    num_rows: int,
) -> None:
    if query.shape[0] != num_rows:
        fix = "one query a row; use attend() for several"
        raise ShapeError(expected("query", f"{num_rows} rows", shape(query), fix))
    for name, states, pages in (("key", key, key_pages), ("value", value, value_pages)):
        _, heads, _, dim = pages.shape
        if states.shape != (num_rows, heads, dim) or states.stride(2) != 1:
            got = f"{shape(states)} with strides {states.stride()}"
            raise ShapeError(
                expected(
                    name, f"[{num_rows}, {heads}, {dim}], dense in the last dim", got, _RESHAPE
                )
            )
        if not states.dtype.is_floating_point:
            want = f"pass {pages.dtype}"
            raise ShapeError(expected(name, "a floating dtype", states.dtype, want))
        check_same_device(name, states, pages)


def _check_rows(
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor | None,
    window: int | None,
    key_pages: Tensor,
) -> None:
    if seq_lens.dim() != 1 or seq_lens.shape[0] > MAX_ROWS:
        fix = "one length a row; split larger batches"
        raise ShapeError(expected("seq_lens", f"[up to {MAX_ROWS}]", shape(seq_lens), fix))
    num_rows = seq_lens.shape[0]
    _check_ints("seq_lens", seq_lens, (num_rows,), key_pages)
    if page_table.dim() != 2 or page_table.stride(1) != 1:
        got = f"{shape(page_table)} with strides {page_table.stride()}"
        raise ShapeError(expected("page_table", "[S, M], dense in the last dim", got, _RESHAPE))
    _check_ints("page_table", page_table, (num_rows, page_table.shape[1]), key_pages)
    if starts is not None:
        _check_ints("starts", starts, (num_rows,), key_pages)
    if window is not None and window < 1:
        fix = "a token sees itself at least; None is no window"
        raise ShapeError(expected("window", "1 or more", window, fix))


def _check_positive(name: str, number: float | None, fix: str) -> None:
    if number is not None and not 0 < number < math.inf:  # which NaN is not either
        raise ShapeError(expected(name, "a positive number", number, fix))


def _check_plan(
    plan: DecodePlan,
    page_table: Tensor,
    key_pages: Tensor,
    options: Options,
    batch_invariant: bool,
    cu_query_lens: Tensor | None,
) -> None:
    num_rows, num_pages = page_table.shape
    _, num_kv_heads, page_size, key_dim = key_pages.shape
    purpose = Purpose(
        num_rows,
        num_kv_heads,
        key_dim,
        key_pages.dtype,
        num_pages * page_size,
        options.window,
        batch_invariant,
    )
    if plan.purpose != purpose:
        fix = "call plan_decode() for these rows, pages and options"
        raise ShapeError(expected("plan", f"one for {purpose}", plan.purpose, fix))
    for name, planned, passed in (
        ("starts", plan.starts, options.starts),
        ("cu_query_lens", plan.cu_query_lens, cu_query_lens),
    ):
        if planned is not passed:
            want = f"one made with the tensor that is passed as {name}"
            fix = "pass the same to plan_decode() and here"
            raise ShapeError(expected("plan", want, "one made with another, or with none", fix))


def _check_of_head(name: str, of_head: Tensor, num_heads: int, pages: Tensor) -> None:
    if (
        of_head.shape != (num_heads,)
        or not of_head.is_contiguous()
        or not of_head.dtype.is_floating_point
    ):
        want, got = f"[{num_heads}] of a floating dtype", f"{shape(of_head)} {of_head.dtype}"
        raise ShapeError(expected(name, f"{want}, contiguous", got, "one for each query head"))
    check_same_device(name, of_head, pages)


def _check_ints(name: str, tensor: Tensor, size: tuple[int, ...], pages: Tensor) -> None:
    if tensor.shape != size or tensor.dtype != torch.int32:
        got = f"{shape(tensor)} {tensor.dtype}"
        raise ShapeError(expected(name, f"{list(size)} torch.int32", got, "call .int()"))
    if tensor.dim() == 1 and not tensor.is_contiguous():
        raise ShapeError(expected(name, "stride 1", tensor.stride(), "call .contiguous()"))
    check_same_device(name, tensor, pages)


def _check_lengths(seq_lens: Tensor, page_table: Tensor, key_pages: Tensor) -> None:
    """On the CPU, where it costs nothing to look."""
    room = page_table.shape[1] * key_pages.shape[2]
    longest = max(seq_lens.tolist(), default=0)
    if longest > room:
        fix = "pass as many pages as the longest row has"
        raise ShapeError(expected("page_table", f"room for {longest} tokens", room, fix))


# --- what the ops do on each device ---------------------------------------------------------


def _attend_cpu(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_query_lens: Tensor,
    max_query_len: int,
    return_lse: bool,
    batch_invariant: bool,
    plan_table: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    args = query, key_pages, value_pages, page_table, seq_lens, cu_query_lens
    meaning = Options(*options)._asdict()
    if return_lse:
        out, lse = reference.attend(*args, **meaning)
        return out, lse.float()
    return attend_dense(*args, **meaning), _no_lse(query)


def _attend_cuda(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_query_lens: Tensor,
    max_query_len: int,
    return_lse: bool,
    batch_invariant: bool,
    plan_table: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    meaning = Options(*options)
    num_tokens, num_heads, _ = query.shape
    # Tokens beyond the last row's are nobody's: they give 0, and -inf.
    out = query.new_zeros(num_tokens, num_heads, value_pages.shape[3])
    lse = None
    if return_lse:
        lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    # Where all rows have several queries one kernel serves them; but with `batch_invariant` a row
    # of one is served as it would be among other rows.
    num_rows = seq_lens.shape[0]
    singles = batch_invariant or may_have_single_queries(num_tokens, num_rows, max_query_len)
    if max_query_len > 1:
        attend_prefill(
            query,
            key_pages,
            value_pages,
            page_table,
            seq_lens,
            cu_query_lens,
            out,
            lse=lse,
            min_query_len=2 if singles else 1,
            **meaning._asdict(),
        )
    if singles:
        if plan_table is None:
            plan_table = _plan(
                seq_lens,
                page_table,
                key_pages,
                meaning.window,
                meaning.starts,
                cu_query_lens,
                batch_invariant,
            ).table
        attend_decode(
            query,
            key_pages,
            value_pages,
            page_table,
            plan_table,
            plan.max_pieces_of(plan_table, num_rows, key_pages.shape[1]),
            out,
            scale=meaning.scale,
            softcap=meaning.softcap,
            sinks=meaning.sinks,
            alibi_slopes=meaning.alibi_slopes,
            seq_lens=seq_lens,
            cu_query_lens=cu_query_lens,
            lse=lse,
            batch_invariant=batch_invariant,
        )
    return out, _no_lse(query) if lse is None else lse


def _attend_fake(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_query_lens: Tensor,
    max_query_len: int,
    return_lse: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty(num_tokens, num_heads, value_pages.shape[3])
    if return_lse:
        return out, query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    return out, _no_lse(query)


def _write_and_attend_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    batch_invariant: bool,
    plan_table: Tensor | None,
    *options: Any,
) -> Tensor:
    args = query, key, value, key_pages, value_pages, page_table, seq_lens
    return write_and_attend_dense(*args, **Options(*options)._asdict())


def _write_and_attend_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    batch_invariant: bool,
    plan_table: Tensor | None,
    *options: Any,
) -> Tensor:
    scale, window, softcap, sinks, alibi_slopes, starts = options
    out = query.new_empty(query.shape[0], query.shape[1], value_pages.shape[3])
    if plan_table is None:
        plan_table = _plan(
            seq_lens, page_table, key_pages, window, starts, None, batch_invariant
        ).table
    attend_decode(
        query,
        key_pages,
        value_pages,
        page_table,
        plan_table,
        plan.max_pieces_of(plan_table, query.shape[0], key_pages.shape[1]),
        out,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        seq_lens=seq_lens,
        new_key=key,
        new_value=value,
        batch_invariant=batch_invariant,
    )
    return out


def _write_and_attend_fake(
    query: Tensor, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, *rest: Any
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value_pages.shape[3])


def _no_lse(query: Tensor) -> Tensor:
    return query.new_empty(0, dtype=torch.float32)


def _plan(
    seq_lens: Tensor,
    page_table: Tensor,
    key_pages: Tensor,
    window: int | None,
    starts: Tensor | None,
    cu_query_lens: Tensor | None,
    batch_invariant: bool,
) -> DecodePlan:
    _, num_kv_heads, page_size, key_dim = key_pages.shape
    return plan.plan_decode(
        seq_lens,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        dtype=key_pages.dtype,
        max_seq_len=page_table.shape[1] * page_size,
        window=window,
        starts=starts,
        cu_query_lens=cu_query_lens,
        batch_invariant=batch_invariant,
    )


# A plan holds counters that the kernels count up.
_PLAN = "bool batch_invariant, Tensor(p!)? plan_table"
_OPTIONS = (
    "float scale, int? window, float? softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? starts"
)

_attend = register(
    "attend(Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table, "
    "Tensor seq_lens, Tensor cu_query_lens, SymInt max_query_len, bool return_lse, "
    f"{_PLAN}, {_OPTIONS}) -> (Tensor, Tensor)",
    cpu=_attend_cpu,
    cuda=_attend_cuda if kernels.AVAILABLE else _attend_cpu,
    fake=_attend_fake,
)
_write_and_attend = register(
    "write_and_attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pages, "
    "Tensor(b!) value_pages, Tensor page_table, Tensor seq_lens, "
    f"{_PLAN}, {_OPTIONS}) -> Tensor",
    cpu=_write_and_attend_cpu,
    cuda=_write_and_attend_cuda if kernels.AVAILABLE else _write_and_attend_cpu,
    fake=_write_and_attend_fake,
)
