"""Tensor operations on pages. They know no sequence and no model."""

from pageforge.ops.reference import copy_pages, gather_kv, write_kv

__all__ = ["copy_pages", "gather_kv", "write_kv"]
