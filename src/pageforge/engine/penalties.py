"""Penalties on tokens that came before, and the counts they need, kept on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pageforge.batch import to_device


class TokenCounts:
    """How often each token came, in a slot for each row that has penalties; slots come as needed.

    in_prompt: `[slots, V]` bool. in_output: `[slots, V]` int32, how often.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self.in_prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=device)
        self.in_output = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def claim(self, prompt: npt.NDArray[np.int64], output: npt.NDArray[np.int64]) -> int:
        """A slot that counts these tokens."""
        vocab_size, device = self.in_output.shape[1], self.in_output.device
        # A prompt can hold ids beyond the logits (those of images, say); they are never sampled.
        prompt = np.unique(prompt[prompt < vocab_size])
        output, times = np.unique(output, return_counts=True)
        if not self._free:
            self._grow()
        slot = self._free[-1]
        self.in_prompt[slot].zero_().index_fill_(0, to_device(prompt, device), True)
        self.in_output[slot].zero_().index_copy_(
            0, to_device(output, device), to_device(times.astype(np.int32), device)
        )
        return self._free.pop()

    def release(self, slot: int) -> None:
        """The slot may be claimed again."""
        self._free.append(slot)

    def release_all(self) -> None:
        """So may all of them."""
        self._free = list(range(len(self.in_output) - 1, -1, -1))

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count one more of `tokens[i]` in slot `slots[i]`; the slots are different ones."""
        places = slots * self.in_output.shape[1] + tokens
        self.in_output.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _grow(self) -> None:
        """Twice the slots, so that growing costs O(1) a slot."""
        before, vocab_size = self.in_output.shape
        after = max(1, 2 * before)
        with torch.inference_mode(False):  # else they could only be written to in that mode
            in_prompt = self.in_prompt.new_zeros((after, vocab_size))
            in_output = self.in_output.new_zeros((after, vocab_size))
        in_prompt[:before] = self.in_prompt
        in_output[:before] = self.in_output
        self.in_prompt, self.in_output = in_prompt, in_output
        self._free = list(range(after - 1, before - 1, -1))


@dataclass(frozen=True, slots=True)
class Penalties:
    """Those of N rows.

    rows: `[N]` int64 of the batch, or all. slots: `[N]` int64 of the token counts.
    repetition, presence, frequency: `[N, 1]` float32.
    """

    rows: Tensor | slice
    slots: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def apply_to(self, logits: Tensor, counts: TokenCounts) -> None:
        """Change `logits` `[R, V]` float32 in place."""
        in_output = counts.in_output[self.slots]
        came = in_output > 0
        penalised = logits[self.rows]
        repeated = torch.where(
            penalised < 0, penalised * self.repetition, penalised / self.repetition
        )
        penalised = torch.where(came | counts.in_prompt[self.slots], repeated, penalised)
        logits[self.rows] = penalised - came * self.presence - in_output * self.frequency
