"""Host memory that this process may use: the machine's, or less where a control group (Slurm, a container) sets a limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from stack.dist.control_groups import memory_groups

UNLIMITED = 1 << 60
"""Bytes. Version 1 of control groups writes a number like it where there is no limit."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes on this node. free: without driving anything else out. total: with nothing else there."""

    free: int
    total: int


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """None where the system does not tell (it is no Linux). root: of the file system, for tests."""
    try:
        lines = (root / "proc/meminfo").read_text()
        free, total = (
            1024 * int(re.findall(rf"^{name}: +(\d+) kB", lines, re.MULTILINE)[0])
            for name in ("MemAvailable", "MemTotal")
        )
    except (OSError, IndexError):
        return None
    for limit, used in _groups(root):
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return HostMemory(free, total)


def resident_bytes() -> int:
    """Memory that this process has resident."""
    return psutil.Process().memory_info().rss


def reset_peak_resident() -> bool:
    """Let `peak_resident_bytes` begin anew; False where the system does not let a process do it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """Most memory that this process had resident since the reset, else since its start; now, where nobody counts it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resident_bytes()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of this process's control groups and those above them."""
    for version, base, own in memory_groups(root):
        names, cache = ("memory.max", "memory.current"), "inactive_file"
        if version == 1:
            names, cache = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        for group in (own, *own.parents):  # ends at "."; a container may see itself there
            folder = base / group
            try:
                limit, used = ((folder / name).read_text().strip() for name in names)
                stat = (folder / "memory.stat").read_text()
            except OSError:  # the root has no limit, and a container does not see above itself
                continue
            if limit != "max" and int(limit) < UNLIMITED:
                dropped = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
                yield int(limit), int(used) - (int(dropped[1]) if dropped else 0)
