"""PlainStore: one ordinary allocation."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from pageforge.store import DeviceMemoryError, PlainStore

CPU = torch.device("cpu")


class Owner:
    pass


def test_everything_is_mapped_from_the_first_to_the_last_moment() -> None:
    store = PlainStore(1 << 16, CPU)
    assert not store.elastic
    data = store.tensor(torch.float16)
    assert data.numel() == 1 << 15
    assert store.bytes_mapped(0) == store.bytes_mapped(1 << 16) == 1 << 16
    store.map(0, 100)
    data[:] = 2
    store.unmap([(0, 1 << 16)])
    assert bool((data == 2).all())
    store.close()
    assert store.bytes_mapped(0) == 0
    store.close()


def test_close_drops_the_memory() -> None:
    store = PlainStore(1 << 16, CPU)
    memory = weakref.ref(store._bytes)
    store.close()
    assert memory() is None


def test_an_export_outlives_the_store() -> None:
    store = PlainStore(1 << 16, CPU)
    store.tensor(torch.uint8)[:] = 9
    owner = Owner()
    alive = weakref.ref(owner)
    array = np.from_dlpack(store.export(10, 20, owner))
    del owner
    store.close()
    del store
    assert alive() is not None and array.tolist() == [9] * 10
    del array
    assert alive() is None


def test_an_export_from_another_device_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match=r"copy them from pool\.pages"):
        PlainStore(16, torch.device("meta")).export(0, 8, None)


def test_the_system_refuses() -> None:
    with pytest.raises(DeviceMemoryError, match=f"allocation of {1 << 50} bytes"):
        PlainStore(1 << 50, CPU)
