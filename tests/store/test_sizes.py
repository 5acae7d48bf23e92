"""How much memory there is, and how people write amounts of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pageforge.errors import GeometryError
from pageforge.store import free_bytes, parse_memory, sizes

CPU = torch.device("cpu")
FREE = 1000


@pytest.mark.parametrize(
    ("amount", "value"),
    [
        (1, 1),
        (10**15, 10**15),
        (0.5, 500),
        (1.0, 1000),
        ("50%", 500),
        ("12.5%", 125),
        ("100%", 1000),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        (" 4 GiB ", 4 << 30),
        ("4Gi", 4 << 30),
        ("4GB", 4 * 10**9),
        ("4G", 4 * 10**9),
        ("1.5 MiB", 3 << 19),
        ("2kb", 2000),
        ("2KiB", 2048),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_amounts(amount: int | float | str, value: int) -> None:
    assert parse_memory(amount, FREE) == value


@pytest.mark.parametrize(
    "amount",
    [
        *(0, -1, 0.0, -0.5, 1.01, 4e9, float("nan"), float("inf"), True, False),
        *("", "0", "0%", "101%", "-1", "-4GiB", "4XB", "4IB", "GiB", "four", "1e9", "4 G B", "½"),
        *(None, [1], (1,), np.int64(5), b"4GiB", Path("4GiB")),
    ],
)
def test_bad_amounts_say_what_is_expected(amount: Any) -> None:
    with pytest.raises(GeometryError, match=r'max_memory: expected bytes, a fraction.*"4GiB"'):
        parse_memory(amount, FREE)


def test_a_fraction_of_nearly_nothing() -> None:
    with pytest.raises(GeometryError):
        parse_memory(0.1, 5)


# --- what is free on the CPU ---------------------------------------------------------------


def cgroup(folder: Path, version: int, limit: str, usage: str, stat: str = "") -> Any:
    """A control group's files in `folder`, as an entry of CGROUPS."""
    _, limit_name, usage_name, reclaimable = sizes.CGROUPS[version - 2]
    folder.mkdir(exist_ok=True)
    (folder / limit_name).write_text(limit + "\n")
    (folder / usage_name).write_text(usage + "\n")
    (folder / "memory.stat").write_text(stat)
    return str(folder), limit_name, usage_name, reclaimable


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_host_free", lambda: 10_000)
    monkeypatch.setattr(sizes, "CGROUPS", sizes.CGROUPS)


def test_the_names_of_both_versions() -> None:
    assert [entry[:2] for entry in sizes.CGROUPS] == [
        ("/sys/fs/cgroup", "memory.max"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ]


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize(
    ("limit", "usage", "free"),
    [
        ("8000", "3000", 5000),
        ("20000", "3000", 10_000),  # the host has no more
        ("8000", "9000", 0),
        ("9223372036854771712", "3000", 10_000),  # how version 1 says "no limit"
        ("max", "3000", 10_000),
    ],
)
def test_containers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    limit: str,
    usage: str,
    free: int,
) -> None:
    monkeypatch.setattr(sizes, "CGROUPS", [cgroup(tmp_path, version, limit, usage)])
    assert free_bytes(CPU) == free


@pytest.mark.parametrize("version", [2, 1])
def test_files_that_were_read_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Reading a model's weights fills the container's page cache: no reason for a tiny pool."""
    stat = "anon 100\ninactive_file 2500\nactive_file 77\ntotal_inactive_file 2500\n"
    monkeypatch.setattr(sizes, "CGROUPS", [cgroup(tmp_path, version, "8000", "7000", stat)])
    assert free_bytes(CPU) == 3500


def test_no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CGROUPS", [(str(tmp_path / "missing"), *sizes.CGROUPS[0][1:])])
    assert free_bytes(CPU) == 10_000


def test_the_tightest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        cgroup(tmp_path / "a", 2, "8000", "3000"),
        cgroup(tmp_path / "b", 1, "7000", "3000"),
    ]
    monkeypatch.setattr(sizes, "CGROUPS", entries)
    assert free_bytes(CPU) == 4000


def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert free_bytes(torch.device("cuda", 1)) == 123
