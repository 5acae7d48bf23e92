"""Which store a device gets, and what comes after it where it is refused."""

from __future__ import annotations

import pytest
import torch

from pageforge.errors import UnsupportedModel
from pageforge.store import (
    DeviceMemoryError,
    MmapStore,
    PlainStore,
    VirtualMemoryStore,
    backend_of,
    cpu,
    cuda,
    is_elastic,
    open_store,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def refuse(self: MmapStore, num_bytes: int) -> None:
    raise DeviceMemoryError("refused")


@pytest.mark.skipif(not cpu.supported(), reason="Linux alone has it")
def test_the_cpu_on_linux() -> None:
    assert type(open_store(100, CPU)) is MmapStore
    assert is_elastic(CPU) and backend_of(CPU) == MmapStore.name


def test_the_cpu_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "supported", lambda: False)
    assert type(open_store(100, CPU)) is PlainStore
    assert not is_elastic(CPU) and backend_of(CPU) == PlainStore.name


def test_an_ordinary_allocation_where_the_mapping_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MmapStore, "__init__", refuse)
    store = open_store(100, CPU)
    assert type(store) is PlainStore and store.bytes_mapped(0) == 100
    with pytest.raises(DeviceMemoryError):
        open_store(1 << 50, CPU)


def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, store in ((True, VirtualMemoryStore), (False, PlainStore)):
        monkeypatch.setattr(cuda, "supported", lambda device, supported=supported: supported)
        assert backend_of(CUDA) == store.name
        assert is_elastic(CUDA) == store.elastic


@pytest.mark.parametrize("name", ["mps", "meta", "xpu"])
def test_other_devices_are_refused_with_the_reason(name: str) -> None:
    for call in (backend_of, is_elastic, lambda device: open_store(1, device)):
        with pytest.raises(UnsupportedModel, match=f"expected cpu or cuda, got {name}.*no kernels"):
            call(torch.device(name))
