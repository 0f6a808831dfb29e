"""Kills a small run of two ranks at random moments, starts it again each time, and holds the outcome to an unbroken run.

    python tests/e2e/kills.py --kills 100

SIGKILL hits one of the two ranks or their launcher, from the first moment of a start to the end of the run: while ranks
join, in a step, in a save, in the export. After each kill all processes must be gone by themselves within LIMIT_S. Each
start must go on from the newest checkpoint that was published. In the end every file of the last checkpoint (weights,
optimizer, counters, random states) and the exported model must be those of the unbroken run, bit for bit; the journal and
W&B must hold each step once; nothing half-written may be left. Prints one line a kill, and a summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from stack.checkpoint.manifest import read_manifest, step_folders, verify_files
from stack.errors import CheckpointError
from tests.forks import ForkedJob, Nursery
from tests.wandb_files import offline_runs

STEPS = 24
LIMIT_S = 30.0
OVERRIDES = [
    "+exp=tiny_cpu",
    "parallel.sp=2",
    "memory=plain",
    "data.seq_len=128",
    "data.eval_fraction=0.1",
    "data.workers=2",
    f"schedule.steps={STEPS}",
    "schedule.warmup_steps=3",
    "checkpoint.every=2",
    "checkpoint.keep=2",
    "log.eval_rows=2",
    "log.eval_every=5",
    "log.wandb=offline",
]
TIMES = re.compile(r"_s$|_gib$|_per_rank$")

TARGETS = ("rank 0", "launcher", "rank 1")


class Siege:
    """Runs below one folder, the kills they suffered, and what was found."""

    def __init__(self, folder: Path, nursery: Nursery, seed: int):
        self.folder, self.nursery, self.draw = folder, nursery, random.Random(seed)
        self.whole_s = 0.0
        self.moments: Counter[str] = Counter()
        self.targets: Counter[str] = Counter()
        self.slowest_s, self.resumes, self.compared = 0.0, 0, 0

    def run_whole(self) -> None:
        """The unbroken run; its length is the time within which kills fall."""
        begin = time.monotonic()
        job = self.start("whole")
        codes = self.nursery.wait(job, 300)
        assert codes == [0, 0, 0], f"{codes}\n{job.output}"
        self.whole_s = time.monotonic() - begin

    def start(self, name: str) -> ForkedJob:
        return self.nursery.start([*OVERRIDES, f"name={name}"], self.folder)

    def break_run(self, name: str, kills: int) -> int:
        """Starts the run until it is complete, and kills it up to so many times. Returns how many it were."""
        suffered = 0
        while True:
            newest = newest_step(self.checkpoints(name))
            job = self.start(name)
            killed = suffered < kills and self.kill_somebody(job, name)
            codes = self.nursery.wait(job, LIMIT_S if killed else 300)
            self.check_start(job, newest)
            if not killed:
                assert codes == [0, 0, 0], f"{codes}\n{job.output}"
                self.check_outcome(name)
                return suffered
            suffered += 1

    def kill_somebody(self, job: ForkedJob, name: str) -> bool:
        """False if the run was over first."""
        target = TARGETS[self.moments.total() % len(TARGETS)]  # in turn, so that a few kills meet all
        pid = job.launcher if target == "launcher" else job.ranks[int(target[-1])]
        moment = time.monotonic() + self.draw.uniform(0, self.whole_s)
        while time.monotonic() < moment:
            if all(gone(rank) for rank in job.ranks):
                return False
            time.sleep(0.002)
        phase = self.phase(job, name)
        if gone(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        self.nursery.wait(job, LIMIT_S)
        seconds = time.monotonic() - begin
        self.slowest_s = max(self.slowest_s, seconds)
        self.moments[phase] += 1
        self.targets[target] += 1
        print(f"{name}: {target} killed in {phase}, all gone after {seconds:.1f} s", flush=True)
        return True

    def phase(self, job: ForkedJob, name: str) -> str:
        output = job.output
        if "The run is complete" in output or (self.folder / "runs" / name / "hf.partial").exists():
            return "the end"
        if "step " not in output.partition("training:")[2]:
            return "the start"
        saving = any(path.name.endswith(".partial") for path in self.checkpoints(name).glob("*"))
        return "a save" if saving else "the steps"

    def checkpoints(self, name: str) -> Path:
        return self.folder / "runs" / name / "checkpoints"

    def check_start(self, job: ForkedJob, newest: int | None) -> None:
        """It went on from the newest checkpoint, if it came so far as to say."""
        output = job.output
        said = re.search(r"resuming from step (\d+)", output)
        if said:
            assert int(said[1]) == newest, f"newest was {newest}\n{output}"
            self.resumes += 1
        elif "starting from step 0" in output:
            assert newest is None, f"newest was {newest}\n{output}"

    def check_outcome(self, name: str) -> None:
        """As if nothing had happened."""
        whole, broken = (self.folder / "runs" / run for run in ("whole", name))
        manifests = []
        for run in (whole, broken):
            newest = step_folders(run / "checkpoints")[0]
            manifests.append(read_manifest(newest))
            verify_files(newest, manifests[-1])
        assert manifests[0].step == manifests[1].step == STEPS
        different = [
            name for name, digest in manifests[0].checksums.items() if manifests[1].checksums[name] != digest
        ]
        for name in different:
            newest = [step_folders(run / "checkpoints")[0] / name for run in (whole, broken)]
            assert "model_states" in name and equal(*map(load_states, newest)), name
        weights = [(run / "hf" / "model.safetensors").read_bytes() for run in (whole, broken)]
        assert weights[0] == weights[1]
        journals = [numbers(run) for run in (whole, broken)]
        assert [record["step"] for record in journals[1]] == list(range(1, STEPS + 1))
        assert journals[0] == journals[1]
        logged = offline_runs(broken)
        assert len({run_id for run_id, _ in logged}) == 1
        assert [row["step"] for _, rows in logged for row in rows] == list(range(1, STEPS + 1))
        left = [str(path) for path in broken.rglob("*") if "partial" in path.name]
        assert not left and not (broken / "stopped.json").exists(), left
        self.compared += 1

    def summary(self) -> dict[str, Any]:
        return {
            "kills": self.moments.total(),
            "targets": dict(self.targets),
            "moments": dict(self.moments),
            "resumes_from_newest": self.resumes,
            "runs_equal_to_the_unbroken": self.compared,
            "slowest_end_s": round(self.slowest_s, 1),
        }


def newest_step(folder: Path) -> int | None:
    """Step of the newest complete checkpoint."""
    for path in step_folders(folder):
        with suppress(CheckpointError):
            return read_manifest(path).step
    return None


def numbers(run: Path) -> list[dict[str, Any]]:
    """The journal without what depends on the machine's speed and memory."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not TIMES.search(key)} for line in lines
    ]


def load_states(path: Path) -> Any:
    """Weights and counters, without the record of a last evaluation that a stop has left to the next start."""
    states = torch.load(path, weights_only=False)
    states["train_state"]["pending_record"] = {}
    return states


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, through dicts and lists of tensors and plain values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def gone(pid: int) -> bool:
    """Ended, though its exit code may not have been read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def besiege(siege: Siege, kills: int) -> dict[str, Any]:
    """Runs until so many kills are suffered, the last run to its end. Raises AssertionError where something is lost."""
    siege.run_whole()
    number = 0
    while siege.moments.total() < kills:
        number += 1
        siege.break_run(f"broken{number}", kills - siege.moments.total())
    return siege.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="kept afterwards; else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary, Nursery() as nursery:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(besiege(Siege(folder, nursery, options.seed), options.kills)), flush=True)


if __name__ == "__main__":
    main()
