"""StepBuffer: one buffer on the device takes all numbers of a step in one copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pageforge.engine.device_rows import DeviceRows
from pageforge.engine.packed import PackedInputs
from pageforge.engine.step import Padding, StepArrays, StepShape, part_lengths
from pageforge.pool import PagePool

HOST_BUFFERS = 2
"""Host buffers of a step's numbers: one is read by the step in flight while the next is filled."""


class LoadedStep(NamedTuple):
    """What a step reads on the device. Graphs read it where it lies.

    `logit_places`: of the tokens whose logits are wanted; None for those of all. `changes`: for
    each layer group places in its flat page table, and the page ids that belong there now.
    """

    inputs: PackedInputs
    logit_places: Tensor | None
    changes: list[tuple[Tensor, Tensor]]


class StepBuffer:
    """The latest step's numbers on the device, and views of them for each shape."""

    def __init__(self, pool: PagePool, device_rows: DeviceRows, padding: Padding):
        geometry = pool.geometry
        self._geometry = geometry
        self._layers = {
            layer: pool.layer(layer) for group in geometry.groups for layer in group.layers
        }
        self._page_tables = device_rows.page_tables
        self._padding = padding
        device = device_rows.last_tokens.device
        max_rows, max_tokens = len(device_rows), padding.max_tokens
        with torch.inference_mode(False):  # else they could only be written to in that mode
            self._bounds = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
            shapes = (
                StepShape(max_tokens, max_rows, max_tokens, False, False),
                StepShape(max_rows, max_rows, max_rows, True, False),
            )
            size = max(sum(self._sizes(shape)) for shape in shapes)
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
            pinned = device.type == "cuda"
            self._host = [
                torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                for _ in range(HOST_BUFFERS)
            ]
        self._turn = 0
        self._loaded: dict[StepShape, LoadedStep] = {}
        self._sent: tuple[Tensor, Tensor] | None = None  # the latest copy of a step's numbers

    def load(self, shape: StepShape, arrays: StepArrays) -> LoadedStep:
        """Copy a step's numbers to the device, in one go; what reads them there."""
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % HOST_BUFFERS
        flat, start = host.numpy(), 0
        for array, size in zip(arrays, self._sizes(shape), strict=True):
            flat[start : start + size] = array.view(np.uint8)
            start += size
        self._sent = self._buffer[:start], host[:start]
        self.send()
        if not self._padding.is_padded(shape):  # it hardly ever comes again
            return self._views(shape)
        if shape not in self._loaded:
            self._loaded[shape] = self._views(shape)
        return self._loaded[shape]

    def send(self) -> None:
        """Copy the latest step's numbers to the device (once more)."""
        assert self._sent is not None
        self._sent[0].copy_(self._sent[1], non_blocking=True)

    def _sizes(self, shape: StepShape) -> list[int]:
        """Bytes of each part of a step's numbers, in their order."""
        longs, ints = part_lengths(shape, len(self._page_tables))
        return [8 * length for length in longs] + [4 * length for length in ints]

    def _views(self, shape: StepShape) -> LoadedStep:
        views, start = [], 0
        num_groups = len(self._page_tables)
        lengths = part_lengths(shape, num_groups)
        for dtype, of_parts in zip((torch.int64, torch.int32), lengths, strict=True):
            for length in of_parts:
                stop = start + length * dtype.itemsize
                views.append(self._buffer[start:stop].view(dtype))
                start = stop
        tokens, positions, *rest = views
        if shape.decodes:
            places, (seq_lens, *page_ids) = rest[:num_groups], rest[num_groups:]
            logit_places, slots, bounds = None, None, self._bounds[: shape.rows + 1]
            changes = list(zip(places, page_ids, strict=True))
        else:
            *slots, logit_places, seq_lens, bounds = rest
            changes = []
        inputs = PackedInputs(
            self._geometry,
            self._layers,
            tokens,
            positions,
            seq_lens,
            bounds,
            [table[: shape.rows] for table in self._page_tables],
            slots,
        )
        return LoadedStep(inputs, logit_places, changes)
