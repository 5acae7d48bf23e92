"""Launching a Triton kernel again and again at little cost to the host.

`kernel[grid](...)` looks at every argument each time to find the compiled variant: some 40 us on an
H200's host, longer than a small kernel runs. A decode step launches the same few variants for every
layer, so here the caller names the variant and a dictionary finds it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

VECTOR_BYTES = 16
"""Kernels compiled for pointers that divide by this load 16 bytes at a time."""


def addresses(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    """Where the data of each lies; 0 for None.

    Triton takes them in place of tensors, for less: of a tensor it would ask the address and then
    CUDA whose that is. That a tensor is on the device is for the caller to know.
    """
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def misaligned(pointers: Sequence[int]) -> tuple[bool, ...]:
    """Which addresses vectors cannot be loaded from; () where that is none, as nearly always."""
    if functools.reduce(operator.or_, pointers) % VECTOR_BYTES == 0:
        return ()
    return tuple([pointer % VECTOR_BYTES != 0 for pointer in pointers])


def dense_last(states: Tensor) -> Tensor:
    """The same, copied where the last dim is not dense, for kernels cannot read that."""
    return states if states.stride(-1) == 1 else states.contiguous()


def stream_handle(device: torch.device) -> int:
    """The thread's current stream on a CUDA device, as CUDA names it.

    `torch.cuda.current_stream()` makes an object, in as much time as a small kernel's launch.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle


class Launcher:
    """One Triton kernel and its compiled variants.

    The kernel's parameters are, in this order, what changes from launch to launch and its constants
    (`tl.constexpr`).
    """

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def prepare(
        self,
        variant: Hashable,
        device: torch.device,
        grid: tuple[int, int, int],
        first: tuple[Any, ...],
        rest: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> Callable[..., None]:
        """A function of the kernel's first arguments, which launches it on the current stream.

        `first` are examples of them, all alike for Triton; `rest` the other arguments. The launch
        is on `device`, be it the current one or not; the stream stays what it is now. On CUDA the
        function takes `addresses` as well as tensors.

        All that Triton specialises on must follow from `variant`: constants, options, dtypes,
        which arguments are None, alignment, and integers unless the kernel names them in
        `do_not_specialize`.
        """
        if device.type != "cuda":  # Triton's interpreter
            return lambda *args: self._kernel[grid](*args, *rest, **constants)
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.prepare(variant, device, grid, first, rest, constants, options)
        key = (variant, device.index)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel.warmup(*first, *rest, **constants, **options, grid=grid)
            self._compiled[key] = compiled
        # What `compiled[grid](...)` comes to, in half the time: it asks for device and stream in
        # Python, and calls the hooks of Triton's profiler.
        run = functools.partial(
            compiled.run,
            *grid,
            stream_handle(device),
            compiled.function,
            compiled.packed_metadata,
            *(None, None, None),
        )
        fixed = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in rest]
        fixed += constants.values()
        index = device.index

        def launch(*args: Any, rest: tuple[Any, ...] = rest) -> None:  # it keeps `rest` alive
            if torch.cuda.current_device() != index:
                with torch.cuda.device(device):
                    run(*args, *fixed)
            else:
                run(*args, *fixed)

        return launch
