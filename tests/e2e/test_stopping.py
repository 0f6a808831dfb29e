"""Runs of two ranks that are stopped on purpose, hang, run out of memory, or meet steps that would spoil them.

The troubles come at exact moments: see `train_with_trouble.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stack.checkpoint.manifest import read_manifest
from tests.e2e.kills import OVERRIDES, STEPS, Siege, numbers
from tests.forks import ForkedJob, Nursery
from tests.wandb_files import offline_runs

SCRIPT = str(Path(__file__).parent / "train_with_trouble.py")
WAIT_S = 120
SPIKES = ("faults.spike_factor=3", "faults.spike_min_steps=4")
BACK = ("faults=rollback", "faults.spike_min_steps=4", "engine.max_nonfinite_steps=1")

pytestmark = pytest.mark.timeout(600)


class Place:
    """A folder with runs in it."""

    def __init__(self, folder: Path, nursery: Nursery):
        self.folder, self.nursery = folder, nursery

    def run(self, name: str, trouble: str, *more: str) -> tuple[list[int], ForkedJob]:
        job = self.nursery.start([*OVERRIDES, *more, f"name={name}"], self.folder, SCRIPT, TROUBLE=trouble)
        return self.nursery.wait(job, WAIT_S)[1:], job

    def marker(self, name: str) -> dict[str, str]:
        return json.loads((self.folder / "runs" / name / "stopped.json").read_text())

    def weights(self, name: str) -> bytes:
        return (self.folder / "runs" / name / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Place:
    return Place(tmp_path_factory.mktemp("stopping"), nursery)


def test_stops_at_every_moment_lose_nothing(place: Place) -> None:
    siege = Siege(place.folder, place.nursery, seed=0)
    siege.run_whole()
    codes, job = place.run("x", "TERM 0 start 0")
    assert codes == [143, 143] and "error: stopped by SIGTERM" in job.output
    assert not (place.folder / "runs" / "x" / "stopped.json").exists()
    moments = [
        ("USR1 1 step 3", 3, "SIGUSR1"),
        ("INT 0 evaluation 5", 5, "SIGINT"),
        ("TERM 1 save 8", 8, "SIGTERM"),
        ("TERM 1 evaluation 10, USR1 0 evaluation 10", 10, "SIG"),
    ]
    for trouble, step, reason in moments:
        codes, job = place.run("x", trouble)
        assert codes == [0, 0], job.output
        marker = place.marker("x")
        assert marker["step"] == step and marker["reason"].startswith(reason)
        assert marker["checkpoint"].endswith(f"step_{step:06d}") and "name=x" in marker["command"]
        assert f"stopped at step {step} ({reason}" in job.output
    assert len(numbers(place.folder / "runs" / "x")) == 9  # the record of step 10 waits for its evaluation
    codes, job = place.run("x", "")
    assert codes == [0, 0], job.output
    siege.check_outcome("x")


def test_stop_in_the_last_evaluation_leaves_it_to_the_next_start(place: Place) -> None:
    more = ("schedule.steps=4", "log.eval_every=0", "log.wandb=disabled")
    assert place.run("last", f"TERM 1 evaluation {4}", *more)[0] == [0, 0]
    # A signal while the last save is awaited leaves the export to the next start; a third finds nothing to do.
    folder = place.folder / "runs" / "last"
    for trouble in ("TERM 0 end 0", "", ""):
        codes, job = place.run("last", trouble, *more)
        assert codes == [0, 0], job.output
        assert (folder / "stopped.json").exists() == bool(trouble) != (folder / "hf").exists()
        assert "eval_loss" in read_manifest(folder / "checkpoints" / "step_000004").metrics
        records = numbers(place.folder / "runs" / "last")
        assert [record["step"] for record in records] == [1, 2, 3, 4] and "eval_loss" in records[-1]


def test_second_signal_ends_at_once(place: Place) -> None:
    codes, job = place.run("twice", "TWICE 1 step 3")
    assert codes == [143, 143]
    assert "error: stopped by a second signal, SIGTERM\n(seen by rank 1 of 2" in job.output
    assert not (place.folder / "runs" / "twice" / "stopped.json").exists()


@pytest.mark.parametrize(("what", "rank"), [("HANG", 0), ("HOLD", 1)])
def test_hung_rank_ends_the_job_with_the_stacks(what: str, rank: int, place: Place) -> None:
    codes, job = place.run(what, f"{what} {rank} step 6", "faults.watchdog_s=3", "log.wandb=disabled")
    assert codes == [1, 1], job.output
    own = job.output.partition("error: no end within ")[2]
    assert "in step 6 on rank" in own and "(faults.watchdog_s=3)" in own
    stacks = place.folder / "runs" / what / "stacks"
    assert "all_to_all" in (stacks / f"rank_{1 - rank}.txt").read_text()
    if what == "HANG":
        assert "in suffer" in (stacks / f"rank_{rank}.txt").read_text()
        assert f"rank {rank}: suffer (" in own
    else:
        assert f"rank {rank}: no answer" in own


def test_want_of_memory_names_rank_step_and_lever(place: Place) -> None:
    codes, job = place.run("memory", "OOM 1 step 3", "log.wandb=disabled")
    assert codes == [1, 1]
    last = job.output.splitlines()[-3:]
    assert last[0].startswith("error: out of host memory: ") and "can't allocate memory" in last[0]
    assert last[1].startswith("Fix: memory=lean (about ")
    assert last[2].startswith("(seen by rank 1 of 2 on ") and last[2].endswith(", in step 3)")


def test_going_back_equals_dropping_and_survives_a_stop(place: Place) -> None:
    """The weights before bad steps are the same both ways; the data that is passed over stays so after a restart."""
    bad = "NAN 1 step 7, NAN 0 step 8, SPIKE 1 step 12"
    codes, dropped = place.run("dropped", bad, *SPIKES)
    assert codes == [0, 0], dropped.output
    codes, back = place.run("back", f"{bad}, TERM 0 step 13", *BACK)
    assert codes == [0, 0], back.output
    for text in ("back to step 6", "of step(s) 7, 8 will", "back to step 10", "of step(s) 12 will"):
        assert text in back.output
    assert "step 12 read row " in back.output and "document " in back.output
    codes, resumed = place.run("back", bad, *BACK)
    assert codes == [0, 0] and "going back" not in resumed.output, resumed.output
    assert place.weights("back") == place.weights("dropped")
    records = numbers(place.folder / "runs" / "back")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records if record["skipped"] == "passed over"] == [8, 12]
    logged = [row["step"] for _, rows in offline_runs(place.folder / "runs" / "back") for row in rows]
    assert logged == list(range(1, STEPS + 1))
