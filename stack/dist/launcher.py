"""The processes above a rank that must live for the run to go on, and the first rank of its node beside it.

Only launchers that wait for their ranks count: the shell above a plain process may end, as with nohup, and srun's tasks
are ended by Slurm itself. deepspeed has two: the command, and below it one launcher a node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stack.dist.env import RankEnv
from stack.errors import LaunchError

if TYPE_CHECKING:
    import psutil

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


def local_rank(environ: Mapping[str, str]) -> str | None:
    """Of a process on its node, before anything else is known of it; None without a launcher."""
    return environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID"))


def first_of_node_ends(within_s: float = 30) -> bool:
    """Wait for the node's first rank, which this process is not. False: it is still there behind `within_s` seconds.

    Launchers end all ranks as soon as one has left. One that leaves over a fault they all share would so silence the first,
    which is to tell it, while that one still imports: on two busy cores the first came 2 s behind its neighbour.
    """
    import psutil

    end = time.monotonic() + within_s
    while True:
        there = False
        with suppress(psutil.Error):  # the parent is gone
            there = any(map(_is_first, psutil.Process(os.getppid()).children()))
        if not there:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def _is_first(process: psutil.Process) -> bool:
    """Whether it is a living first rank of a node."""
    import psutil

    with suppress(psutil.Error):  # it has just ended, or is another user's
        return local_rank(process.environ()) == "0" and process.status() != psutil.STATUS_ZOMBIE
    return False


def check_hostfile(env: RankEnv) -> None:
    """deepspeed takes a hostfile that is not there for one machine, and starts its own ranks alone, with a warning that
    nobody reads. Raises LaunchError."""
    if env.launcher != "deepspeed":
        return
    import psutil

    with suppress(psutil.Error):  # a launcher of another user, or one that is just ending
        for command in psutil.Process().parents()[1:2]:  # above the launcher of the node
            named = _hostfile(command.cmdline())
            if named is not None and not (Path(command.cwd()) / named).is_file():
                raise LaunchError(
                    f"--hostfile {named}: there is no such file, seen from {command.cwd()}, and deepspeed has started the ranks "
                    f"of this machine alone ({env.world}). Fix: check the path, or leave --hostfile out for one machine"
                )


def _hostfile(words: Sequence[str]) -> str | None:
    """The file that a deepspeed command names before the script; its own arguments are not looked at."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("-H", "--hostfile"):
            return following
        if word.startswith("--hostfile="):
            return word.partition("=")[2]
        if word.endswith("train.py"):
            return None
    return None


def _above() -> list[int]:
    """Parent and grandparent of this process."""
    import psutil  # takes 30 ms, which a question on the command line does without

    parent = os.getppid()
    with suppress(psutil.Error):  # the parent is just ending
        return [parent, psutil.Process(parent).ppid()]
    return [parent]
