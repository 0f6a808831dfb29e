"""The memory control groups (Slurm, a container) that this process lies in, of either version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def memory_groups(root: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, folder of the hierarchy, this process's group below it). root: of the file system, for tests."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        if controllers == "":
            yield 2, root / "sys/fs/cgroup", own
        elif "memory" in controllers.split(","):
            yield 1, root / "sys/fs/cgroup/memory", own
