"""Rank processes by fork from one that has imported what ranks need: 0.1 s each, where a new interpreter takes 5 to 10 s.

The process they come from is started once and runs no test: its state is that of the imports, which every rank has. Its
environment is that of CPU ranks; what libraries read from it as they are imported cannot differ between ranks, and neither
can the order of sets of strings. Forks end without the interpreter's clean-up. Runs under launchers (`e2e`, `golden`, `slurm`)
and ranks with an environment of their own are new interpreters, for both.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

IMPORTS = [
    "tests.fork_ranks",
    "pytest",
    "stack.train.run",
    "stack.bench.contender",
    "stack.engine.build",
    "stack.parallel.apply",
    "transformers.models.qwen3",
]
"""The first brings the checks of shapes with it (tests/__init__.py)."""

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Fork:
    """`function(argument)` in a process of its own, its session's leader, in `env`, writing to `log`; words as of Popen."""

    def __init__(self, function: Callable[[Any], None], argument: Any, env: Mapping[str, str], log: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        # Without a rank: it lives as long as the tests, beside the ranks of launchers that they start.
        common = {key: value for key, value in env.items() if key not in RANK_VARIABLES}
        with mock.patch.dict(os.environ, common):
            forkserver.ensure_running()
        self._process = context.Process(target=_enter, args=(function, argument, dict(env), log))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()


def _end_with_parent() -> None:
    """Waits until the process that asked for this one is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(70)


def _enter(function: Callable[[Any], None], argument: Any, env: dict[str, str], log: Path) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    function(argument)
