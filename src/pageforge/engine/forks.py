"""Forks: completions of one prompt: the first computes it, and the others share its pages."""

from __future__ import annotations

from pageforge.engine.sequence import Rows, Sequence
from pageforge.pool import PagePool


class Forks:
    """Sequences that wait for the prompt of another, their `parent`, by those parents."""

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._parents: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """It is going to compute its prompt, also for its children if it has any."""
        if sequence.children:
            self._parents.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It has ended; the first of its children does what it did not live to do."""
        if sequence in self._parents:
            self._parents.remove(sequence)
        if sequence.parent is not None:
            sequence.parent.children.remove(sequence)
            sequence.parent = None
        if sequence.children:
            first, *others = sequence.children
            sequence.children = []
            first.parent, first.children = None, others
            for other in others:
                other.parent = first
            if others:
                self._parents.append(first)

    def share(self, rows: Rows) -> None:
        """Fork the pages of prompts that are computed or launched; those who waited may begin."""
        for parent in list(self._parents):
            if parent.row < 0 or rows.computed[parent.row] < parent.num_prompt - 1:
                continue
            self._parents.remove(parent)
            for child in parent.children:
                child.parent = None
                # It computes the last token once more, for its logits.
                child.num_computed = child.goal - 1
                if child.num_computed:
                    child.table = self._pool.fork(parent.pages)
                    self._pool.crop([child.table], child.num_computed)
                    child.num_cached = child.num_computed
            parent.children = []
