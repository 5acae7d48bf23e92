"""LazyTensor: made by the first computation, and to all that compute a tensor like any other."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from pageforge.hf.lazy import LazyTensor


class Counted(LazyTensor):
    """Stands for `source`, and counts how often it is made."""

    def __init__(self, shape, dtype, device, strides, source: Tensor):
        self.source = source
        self.made = 0

    def _make(self) -> Tensor:
        self.made += 1
        return self.source


def lazy(source: Tensor, strides=None) -> Counted:
    return Counted(source.shape, source.dtype, source.device, strides, source)


SOURCE = torch.arange(24.0).view(2, 3, 4)

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
def test_what_it_is_like_is_known_without_making_it(mode) -> None:
    with mode():
        it = lazy(SOURCE)
        assert it.shape == SOURCE.shape and it.size(-1) == 4 and len(it) == 2 and it.dim() == 3
        assert it.dtype == SOURCE.dtype and it.device == SOURCE.device
        assert it.stride() == SOURCE.stride() and it.is_contiguous()
        assert not it.requires_grad and it.numel() == 24 and it.element_size() == 4
        assert "2, 3, 4" in repr(it)
        assert it.to("cpu") is it and it.to("cpu", non_blocking=True) is it
        assert not it.is_dense and it.made == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "compute",
    [
        lambda it: it + 1,
        lambda it: 1 - it,
        lambda it: torch.cat([it, it], 1),
        lambda it: it[:, 1:],
        lambda it: it.transpose(1, 2),
        lambda it: it[:, :],
        lambda it: it.view(6, 4),
        lambda it: it.reshape(-1),
        lambda it: it.expand(5, 2, 3, 4),
        lambda it: it.to(torch.float64),
        lambda it: it.clone(),
        lambda it: torch.matmul(it, it.transpose(1, 2)),
        lambda it: torch.nn.functional.scaled_dot_product_attention(it, it, it),
        lambda it: torch.from_numpy(it.numpy()),
        lambda it: torch.from_numpy(np.asarray(it)),
        lambda it: torch.tensor(it.tolist()),
        lambda it: torch.tensor(it.sum().item()),
        copy.deepcopy,
        lambda it: pickle.loads(pickle.dumps(it)),
        lambda it: torch.stack(list(it)),
        torch.from_dlpack,
    ],
)
def test_any_computation_makes_it_dense(mode, compute) -> None:
    with mode():
        it = lazy(SOURCE)
        got = compute(it)
        assert type(got) is Tensor
        assert torch.equal(got, compute(SOURCE))
        assert it.is_dense and it.made == 1
        compute(it)
        assert it.made == 1


def test_it_can_be_saved() -> None:
    buffer = io.BytesIO()
    torch.save(lazy(SOURCE), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), SOURCE)


def test_it_lies_in_the_dense_tensors_memory() -> None:
    it = lazy(SOURCE.clone())
    assert it.data_ptr() == it.source.data_ptr()
    assert it.untyped_storage().data_ptr() == it.source.data_ptr()


def test_what_is_written_to_it_stays() -> None:
    it = lazy(SOURCE.clone())
    it.mul_(2)
    it[0, 0] = 7
    assert torch.equal(it + 0, it.source)
    assert it.source[0, 0, 0] == 7 and it.source[1, 0, 0] == 24


def test_a_gradient_flows_past_it() -> None:
    query = torch.randn(2, 3, 4, requires_grad=True)
    (query * lazy(SOURCE)).sum().backward()
    assert torch.equal(query.grad, SOURCE)


def test_strides_are_as_announced() -> None:
    """A view that the announced strides allow must work."""
    wide = torch.arange(30.0).view(2, 3, 5)
    for strides in (None, (15, 5, 1)):
        it = lazy(wide[..., :4], strides)
        assert it.dense().stride() == it.stride() == (strides or (12, 4, 1))
        assert torch.equal(it.dense(), wide[..., :4])
    assert torch.equal(lazy(wide[..., :4]).reshape(6, 4), wide[..., :4].reshape(6, 4))


@pytest.mark.parametrize("mode", MODES)
def test_to_another_device_or_dtype(mode) -> None:
    with mode():
        it = lazy(SOURCE)
        moved = it.to("meta", non_blocking=True)
        assert type(moved) is Tensor and moved.device.type == "meta"
        assert type(it.to("cpu", torch.float16)) is Tensor
        fresh = it.to("cpu", copy=True)
        assert fresh is not it and type(fresh) is Tensor
