"""How much memory there is, and how people write amounts of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from pageforge.errors import GeometryError, expected

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}

CGROUPS = (  # version 2, then version 1: folder, limit, usage, and what of it can be reclaimed
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def free_bytes(device: torch.device) -> int:
    """Bytes free on `device` now; on the CPU no more than the container still allows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(
        [_host_free(), *(room for cgroup in CGROUPS if (room := _cgroup_room(*cgroup)) is not None)]
    )


def parse_memory(amount: int | float | str, free: int, *, name: str = "max_memory") -> int:
    """Bytes meant by `amount`: bytes (int), a fraction of `free` (0 < float <= 1), "4GiB" or "50%".

    Raises GeometryError, which calls it `name`.
    """
    wrong = GeometryError(
        expected(name, 'bytes, a fraction up to 1.0, "4GiB" or "50%"', repr(amount), "try 0.5")
    )
    if isinstance(amount, bool) or not isinstance(amount, int | float | str):
        raise wrong
    if isinstance(amount, int):
        value = amount
    elif isinstance(amount, float):
        if not 0 < amount <= 1:
            raise wrong
        value = int(amount * free)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:(%)|([KMGT]?I?)B?)\s*", amount.upper())
        if match is None or (match[3] or "") not in UNITS:
            raise wrong
        number = float(match[1])
        if match[2]:
            return parse_memory(number / 100, free, name=name)
        value = int(number * UNITS[match[3]])
    if value <= 0:
        raise wrong
    return value


def _host_free() -> int:
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # Windows without psutil: a modest guess, since the plain store takes all of it at once.
        return 4 << 30
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 4 << 30


def _cgroup_room(folder: str, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes that a container may still take, or None where there is no limit.

    Files that were read (a model's weights, say) count as usage, but give way.
    """
    try:
        most, used, stat = (
            Path(folder, name).read_text().strip() for name in (limit, usage, "memory.stat")
        )
    except OSError:
        return None
    if most == "max":
        return None
    cached = re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE)
    return max(0, int(most) - int(used) + (int(cached[1]) if cached else 0))
