"""Forks: completions of one prompt: the first computes it, and the others share its pages."""

from __future__ import annotations

from pageforge.engine.sequence import Rows, Sequence
from pageforge.pool import PagePool


class Forks:
    """Sequences that wait for the prompt of another, their `parent`, by those parents."""

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._parents: dict[Sequence, None] = {}  # in their order

    def add(self, sequence: Sequence) -> None:
        """It is going to compute its prompt, also for its children if it has any."""
        if sequence.children:
            self._parents[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        """It has ended; the first of its children does what it did not live to do.

        Interrupted, it may be called again.
        """
        self._parents.pop(sequence, None)
        sequence.parent = None  # whose list of children it stays in: looking for it takes long
        if children := _waiting(sequence.children):
            first, *others = children
            for other in others:
                other.parent = first
            if others:
                self._parents[first] = None
            first.parent, first.children, sequence.children = None, others, []

    def share(self, rows: Rows) -> None:
        """Fork the pages of prompts that are computed or launched; those who waited may begin.

        Interrupted, it may be called again.
        """
        for parent in list(self._parents):
            if parent.row < 0 or rows.computed[parent.row] < parent.num_prompt - 1:
                continue
            for child in _waiting(parent.children):
                # It computes the last token once more, for its logits.
                num_shared = child.goal - 1
                if num_shared:
                    child.table = child.table or self._pool.fork(parent.pages)
                    self._pool.crop([child.table], num_shared)
                child.num_computed = child.num_cached = num_shared
                child.parent = None
            parent.children = []
            del self._parents[parent]


def _waiting(children: list[Sequence]) -> list[Sequence]:
    """Those that wait for their parent still."""
    return [child for child in children if child.parent is not None]
