"""What the driver or the system says is taken, and what a cache's own tensors take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.bench.conftest import CPU
from transformers import DynamicCache

from pageforge.bench import memory_use
from pageforge.bench.memory_use import MemoryUse, Meter, storage_bytes

MIB = 1 << 20
SIZE = 64 * MIB
NOISE = 4 * MIB
"""What a process may take or give back beside what is measured."""

tells = pytest.mark.skipif(
    Meter(CPU).read().mapped_bytes is None, reason="this system does not tell"
)


def taken() -> torch.Tensor:
    return torch.ones(SIZE, dtype=torch.uint8)


@tells
def test_what_the_process_takes_is_seen_and_what_it_gives_back() -> None:
    meter = Meter(CPU)
    assert abs(meter.read().mapped_bytes) < NOISE
    tensor = taken()
    assert abs(meter.read().mapped_bytes - SIZE) < NOISE
    del tensor
    assert abs(meter.read().mapped_bytes) < NOISE


@tells
def test_memory_that_was_only_reserved_is_not_taken() -> None:
    meter = Meter(CPU)
    tensor = torch.empty(SIZE, dtype=torch.uint8)
    assert abs(meter.read().mapped_bytes) < NOISE
    tensor[: SIZE // 2] = 1
    assert abs(meter.read().mapped_bytes - SIZE // 2) < NOISE


@tells
def test_a_peak_is_seen_once_its_memory_is_gone_and_begins_anew() -> None:
    meter = Meter(CPU)
    meter.begin_peak()
    taken()
    use = meter.read()
    assert abs(use.mapped_bytes) < NOISE
    assert abs(use.peak_bytes - SIZE) < NOISE
    meter.begin_peak()
    assert meter.read().peak_bytes < NOISE


def test_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_use, "PROCESS", tmp_path / "none")
    meter = Meter(CPU)
    meter.begin_peak()
    assert meter.read() == MemoryUse(None, None, None)


def test_a_device_is_asked_for_all_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"free": 900, "allocated": 30, "most": 30, "emptied": 0, "reset": 0}

    def counting(name: str):
        def call(*args: object) -> None:
            now[name] = now.get(name, 0) + 1

        return call

    fakes = {
        "mem_get_info": lambda device: (now["free"], 1000),
        "memory_allocated": lambda device: now["allocated"],
        "max_memory_allocated": lambda device: now["most"],
        "empty_cache": counting("emptied"),
        "reset_peak_memory_stats": counting("reset"),
        "synchronize": counting("synchronized"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    meter = Meter(torch.device("cuda"))
    meter.begin_peak()
    assert now["reset"] == 1
    # A pool maps 200 of the driver's; torch's allocator has 50 more, and had 70 at its peak.
    now.update(free=650, allocated=80, most=100, emptied=0)
    assert meter.read() == MemoryUse(mapped_bytes=250, peak_bytes=270, torch_peak_bytes=70)
    assert now["emptied"] == 1


def test_storages_are_counted_once_and_whole() -> None:
    cache = DynamicCache()
    keys = torch.zeros(2, 3, 8, 4)
    cache.update(keys, keys + 1, 0)
    assert storage_bytes(cache) == 2 * 2 * 3 * 8 * 4 * 4
    cache.layers[0].values = cache.layers[0].keys[:, :, :1]  # a view of the keys' storage
    assert storage_bytes(cache) == 2 * 3 * 8 * 4 * 4
