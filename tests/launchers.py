"""Starts a script under each launcher, as a user would, and brings back exit codes and the joined output."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LAUNCHERS = ("deepspeed", "torchrun", "srun", "plain")


@dataclass
class Ended:
    """`codes`: exit code of each process started here (one, or one a rank for srun's variables); `output`: theirs and
    their ranks', stdout and stderr in the order they were written."""

    codes: list[int]
    output: str

    @property
    def last_lines(self) -> list[str]:
        """The output without what the launchers themselves log."""
        own = ("[20", "W0", "W1", "E0", "E1")
        return [line for line in self.output.splitlines() if line and not line.startswith(own)]


class Started:
    """Processes that are running; as a context manager it leaves none behind."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], cwd: Path | None = None):
        self.log = tempfile.NamedTemporaryFile(prefix="launch-", suffix=".log", mode="ab")  # noqa: SIM115  closed on leaving
        self.processes = [
            subprocess.Popen(
                list(command),
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                cwd=cwd or ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self.log,  # opened for appending, which keeps the order
                stderr=subprocess.STDOUT,
            )
            for command, env in commands
        ]

    def __enter__(self) -> Started:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.everything():
            if process.is_running():
                process.kill()
        for process in self.processes:
            process.wait()
        self.log.close()

    def everything(self) -> list[psutil.Process]:
        """All processes of this launch that are alive, with their children."""
        tops = [psutil.Process(process.pid) for process in self.processes if process.poll() is None]
        return tops + [child for top in tops for child in top.children(recursive=True)]

    @property
    def output(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 180) -> str:
        """Waits until the output holds `text`; returns the output."""
        limit = time.monotonic() + timeout_s
        while text not in self.output:
            running = any(process.poll() is None for process in self.processes)
            assert running and time.monotonic() < limit, f"{text!r} did not come:\n{self.output}"
            time.sleep(0.05)
        return self.output

    def wait(self, timeout_s: float = 180) -> Ended:
        """Waits for the end; raises TimeoutError with the output at the limit."""
        limit = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > limit:
                raise TimeoutError(f"still running after {timeout_s} s:\n{self.output}")
            time.sleep(0.05)
        return Ended([process.returncode for process in self.processes], self.output)


def start(launcher: str, arguments: Sequence[str], cwd: Path | None = None, **env: str) -> Started:
    """`arguments`: script and its arguments; two ranks, or one for `plain`."""
    if launcher == "deepspeed":
        commands = [([str(BIN / "deepspeed"), "--num_gpus", "2", *arguments], env)]
    elif launcher == "torchrun":
        commands = [([str(BIN / "torchrun"), "--nproc-per-node", "2", *arguments], env)]
    elif launcher == "srun":
        job = {
            "SLURM_JOB_ID": str(random.randrange(10**6)),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
        }
        tasks = [{"SLURM_STEP_ID": "0", "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
        commands = [([sys.executable, *arguments], job | task | env) for task in tasks]
    else:
        commands = [([sys.executable, *arguments], env)]
    return Started(commands, cwd)


def launch(
    launcher: str, arguments: Sequence[str], cwd: Path | None = None, timeout_s: float = 180, **env: str
) -> Ended:
    """Starts and waits."""
    with start(launcher, arguments, cwd, **env) as started:
        return started.wait(timeout_s)
