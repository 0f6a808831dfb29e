"""What happens to jobs: signals, requeues, failures, lost nodes. The outcome is held to a run that nothing happened to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.kills import OVERRIDES, STEPS, Siege
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import QUIET, SUBMIT, Job, submit

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def siege(cluster: Cluster, work: Path) -> Siege:
    """The unbroken run, of the same ranks and nodes."""
    ended = run(cluster, work, "whole").wait()
    assert (ended.state, ended.restarts) == ("COMPLETED", 0)
    return Siege(work, None, 0)  # type: ignore[arg-type]  nothing is forked here


def run(cluster: Cluster, work: Path, name: str, *more: str) -> Job:
    return submit(cluster, work, *OVERRIDES, QUIET, f"name={name}", *more)


def interrupt(job: Job, times: int) -> None:
    """Warn each start of the job once it has made a step of its own."""
    for number in range(1, times + 1):
        before = job.step
        job.wait_for_start(number)
        job.wait_for_step(before + 1)
        job.warn()
        job.wait_until(lambda wanted=number: job.events.count("goes on") >= wanted, 120, "the requeue")


def check_log(job: Job, starts: int) -> None:
    """The output of all starts is there."""
    assert job.log.count(": start ") == starts and "starting from step 0" in job.log
    assert job.log.count("resuming from step ") == starts - 1
    told = subprocess.run(
        [sys.executable, SUBMIT, f"status={job.folder}"], capture_output=True, text=True, check=True
    )
    assert f"step {STEPS} of {STEPS}" in told.stdout and f"{starts} start(s) in 1 job(s)" in told.stdout


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slurm_long)])
def test_warned_jobs_go_on_until_done(times: int, siege: Siege, cluster: Cluster, work: Path) -> None:
    job = run(cluster, work, f"warned{times}")
    interrupt(job, times)
    ended = job.wait()
    assert (ended.state, ended.code, ended.restarts) == ("COMPLETED", 0, times), job.log
    assert job.events == [*["start", "goes on"] * times, "start", "done"]
    check_log(job, times + 1)
    siege.check_outcome(job.folder.name)


@pytest.mark.slurm_long
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_other_launchers_are_warned_alike(launcher: str, siege: Siege, cluster: Cluster, work: Path) -> None:
    job = run(cluster, work, f"warned-{launcher}", f"cluster.launcher={launcher}")
    interrupt(job, 1)
    assert job.wait().restarts == 1
    siege.check_outcome(job.folder.name)


@pytest.mark.slurm_long
def test_chain_where_requeueing_is_forbidden(siege: Siege, cluster: Cluster, work: Path) -> None:
    job = run(cluster, work, "chain", "cluster.restart=chain")
    interrupt(job, 1)
    assert job.wait().code == 0
    job.wait_until(lambda: job.events[-1] == "done", 200, "the end of the next job")
    jobs = [event["job"] for event in job.record if event["event"] == "start"]
    assert len(set(jobs)) == 2
    waiting = cluster.run("squeue", "--noheader", "--format=%i").stdout.split()
    cluster.run("scancel", *waiting)
    assert not waiting, "the next of the chain is taken back at the end"
    siege.check_outcome("chain")


@pytest.mark.slurm_long
def test_scancel_saves_and_ends(siege: Siege, cluster: Cluster, work: Path) -> None:
    job = run(cluster, work, "cancelled")
    job.wait_for_step(3)
    assert cluster.run("scancel", job.number).returncode == 0
    assert job.wait().state == "CANCELLED"
    assert job.events == ["start", "stopped"] and (job.folder / "stopped.json").exists()
    again = run(cluster, work, "cancelled")
    assert again.wait().state == "COMPLETED"
    siege.check_outcome("cancelled")


@pytest.mark.slurm_long
def test_preempted_jobs_save_and_go_on(siege: Siege, cluster: Cluster, work: Path) -> None:
    job = run(cluster, work, "preempted", "cluster.partition=cheap")
    job.wait_for_step(3)
    dear = cluster.submit(
        "--partition=dear", "--nodes=2", "--exclusive", "--wrap=sleep 5", "--output=/dev/null"
    )
    job.wait_for_start(2)
    assert cluster.wait(dear, 60).state == "COMPLETED"
    assert job.wait().state == "COMPLETED"
    assert job.events == ["start", "goes on", "start", "done"], "saved within the grace time"
    siege.check_outcome("preempted")


@pytest.mark.slurm_long
@pytest.mark.parametrize("node", ["node1", "node2"])
def test_killed_rank_restarts_the_job(node: str, siege: Siege, cluster: Cluster, work: Path) -> None:
    job = run(cluster, work, f"killed-{node}")
    job.wait_for_step(5)
    rank = cluster.pids(node, job.number, "launch/train.py")[-1]
    os.kill(rank, signal.SIGKILL)
    job.wait_until(lambda: "failed" in job.events, 60, "the failure")
    assert job.wait().state == "COMPLETED"
    assert job.events == ["start", "failed", "goes on", "start", "done"]
    siege.check_outcome(job.folder.name)


def test_fault_of_the_code_does_not_loop(cluster: Cluster, work: Path) -> None:
    """Two starts without a checkpoint, then the job is over."""
    (work / "short.txt").write_text("too short")
    more = [
        "+exp=tiny_cpu",
        "data=text",
        f"data.path={work / 'short.txt'}",
        "data.train_tokenizer=true",
        "data.vocab_size=272",
        "model.architecture.vocab_size=272",
        "parallel.sp=2",
    ]
    job = submit(cluster, work, *more, "name=faulty", "cluster.launcher=srun", QUIET)
    ended = job.wait()
    assert (ended.state, ended.code, ended.restarts) == ("FAILED", 1, 1)
    assert job.events == ["start", "failed", "goes on", "start", "failed", "gave_up"]
    assert "giving up" in job.log
