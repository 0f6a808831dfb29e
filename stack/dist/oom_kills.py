"""Whether the kernel killed a process for want of host memory: the one trace that such a death leaves."""

from __future__ import annotations

import re
from pathlib import Path

from stack.dist.control_groups import memory_groups


def count_oom_kills(root: Path = Path("/")) -> int:
    """Processes killed so far in this one's control group, else on the whole machine; 0 if neither is told.

    root: of the file system, for tests.
    """
    for path in (*_group_files(root), root / "proc/vmstat"):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:  # not this kind of control group
            continue
        if found:
            return int(found[1])
    return 0


def _group_files(root: Path) -> list[Path]:
    """`memory.events` of version 2 and `memory.oom_control` of version 1, also where a container sees itself as the root."""
    files = []
    for version, base, own in memory_groups(root):
        name = "memory.events" if version == 2 else "memory.oom_control"
        files += [base / own / name, base / name]
    return files
