"""The processes above a rank that must live for the run to go on.

Only launchers that wait for their ranks count: the shell above a plain process may end, as with nohup, and srun's tasks
are ended by Slurm itself. deepspeed has two: the command, and below it one launcher a node.
"""

from __future__ import annotations

import os
from contextlib import suppress

from stack.dist.env import RankEnv

LEVELS = {"deepspeed": 2, "torchrun": 1}
_noted: list[int] = []


def note_launcher() -> None:
    """Remember who is above this process; as early as possible, since a launcher that is gone before would be missed."""
    if not _noted:
        _noted.extend(_above())


def gone_launcher(env: RankEnv) -> str | None:
    """What is gone, in words; None while all of it lives."""
    levels = LEVELS.get(env.launcher, 0)
    gone = sorted(set(_noted[:levels]) - set(_above()[:levels]))
    return f"the {env.launcher} launcher (process {gone}) is gone" if gone else None


def _above() -> list[int]:
    """Parent and grandparent of this process."""
    import psutil  # takes 30 ms, which a question on the command line does without

    parent = os.getppid()
    with suppress(psutil.Error):  # the parent is just ending
        return [parent, psutil.Process(parent).ppid()]
    return [parent]
