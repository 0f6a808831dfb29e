"""Runs on the cluster, submitted as a user would, and what they leave behind."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster, Ended

ROOT = Path(__file__).resolve().parent.parent.parent
SUBMIT = str(ROOT / "launch" / "submit.py")
PLACE = ["cluster=slurm_cpu", "cluster.nodes=2", "cluster.ranks_per_node=1"]
QUIET = "cluster.preflight=false"
START_S = 300.0  # from submission, or from a requeue with its hold, to the first step; 15 s on free cores
END_S = 600.0


@dataclass
class Job:
    """A submitted run."""

    cluster: Cluster
    number: str
    folder: Path

    @property
    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("slurm-*.out")))

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in self.record if event["event"] != "submitted"]

    @property
    def record(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "job.jsonl")

    @property
    def step(self) -> int:
        records = read_lines(self.folder / "metrics.jsonl")
        return records[-1]["step"] if records else 0

    def wait_for_step(self, step: int, limit_s: float = START_S) -> None:
        self.wait_until(lambda: self.step >= step, limit_s, f"step {step}")

    def wait_for_start(self, number: int, limit_s: float = START_S) -> None:
        """Until the job has started so many times."""
        self.wait_until(lambda: self.events.count("start") >= number, limit_s, f"start {number}")

    def wait_until(self, holds: Any, limit_s: float, what: str) -> None:
        limit = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < limit, (
                f"{what} did not come; {self.cluster.show(self.number)}\n{self.log}"
            )
            time.sleep(0.05)

    def warn(self) -> None:
        """What Slurm sends before the time limit."""
        assert self.cluster.run("scancel", "--batch", "--signal=USR1", self.number).returncode == 0

    def wait(self, limit_s: float = END_S) -> Ended:
        try:
            return self.cluster.wait(self.number, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from error


def submit(cluster: Cluster, work: Path, *overrides: str) -> Job:
    """The run that the overrides describe, on two nodes; `work` is where the command is given."""
    done = cluster.run(sys.executable, SUBMIT, *PLACE, *overrides, cwd=work)
    assert done.returncode == 0, done.stdout + done.stderr
    number = re.search(r"submitted: job (\d+)", done.stdout)
    folder = re.search(r"script: (\S+)/job.sbatch", done.stdout)
    assert number is not None and folder is not None
    return Job(cluster, number[1], Path(folder[1]))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines, which may be written to at this moment."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
