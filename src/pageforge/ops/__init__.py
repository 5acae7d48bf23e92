"""Tensor operations on pages. They know no sequence and no model."""

from pageforge.ops.attend import (
    HEAD_DIMS,
    attend,
    attend_with_lse,
    may_have_single_queries,
    plan_decode,
    plans,
    write_and_attend,
)
from pageforge.ops.copy import copy_pages
from pageforge.ops.decode_steps import DecodeSteps
from pageforge.ops.dense import DenseDecode, Scores
from pageforge.ops.gather import gather_kv
from pageforge.ops.plan import DecodePlan
from pageforge.ops.swap import swap_in, swap_out
from pageforge.ops.write import write_kv
from pageforge.ops.write_and_gather import WriteAndGather, write_and_gather

__all__ = [
    "HEAD_DIMS",
    "DecodePlan",
    "DecodeSteps",
    "DenseDecode",
    "Scores",
    "WriteAndGather",
    "attend",
    "attend_with_lse",
    "copy_pages",
    "gather_kv",
    "may_have_single_queries",
    "plan_decode",
    "plans",
    "swap_in",
    "swap_out",
    "write_and_attend",
    "write_and_gather",
    "write_kv",
]
