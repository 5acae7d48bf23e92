"""The policy: which page belongs to whom. Pure Python, no torch, no device."""

from pageforge.memory.allocator import PageAllocator
from pageforge.memory.page_table import PageTable
from pageforge.memory.prefix import PrefixIndex
from pageforge.memory.sequences import SequenceAllocator

__all__ = ["PageAllocator", "PageTable", "PrefixIndex", "SequenceAllocator"]
