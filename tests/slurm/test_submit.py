"""What `launch/submit.py` gives to Slurm: the lint by the cluster itself, arrays of runs, and scripts submitted by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.curve import HERE, RUN
from tests.golden.test_golden import stored
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import QUIET, ROOT, SUBMIT, Job, submit

pytestmark = pytest.mark.timeout(900)
BIG = ["+exp=llama3_8b_15m", "parallel.sp=32", "cluster=slurm", "cluster.partition=big", "dry=true"]
TINY = ["+exp=tiny_cpu", "schedule.steps=2", "data.eval_fraction=0", "log.eval_rows=0", "checkpoint=none"]


def dry(cluster: Cluster, work: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(sys.executable, SUBMIT, *BIG, *overrides, cwd=work)


def test_sixteen_nodes_of_eight_gpus_pass_the_lint(cluster: Cluster, work: Path) -> None:
    for launcher in ("deepspeed", "torchrun", "srun"):
        done = dry(
            cluster, work, "cluster.nodes=16", f"cluster.launcher={launcher}", "cluster.gpu_request=gres"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Job " in done.stdout and "to start at" in done.stdout and "big[1-16]" in done.stdout
    assert cluster.run("squeue", "--noheader").stdout == ""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("cluster.nodes=20", "node count specification invalid"),
        ("cluster.time=3-0", "time limit"),
        ("cluster.partition=none", "invalid partition"),
        ("cluster.constraint=moon", "feature"),
        ('cluster.extra=["--no-such-option"]', "unrecognized option"),
        ("cluster.setup=[\"if true\"]", "no valid shell script"),
    ],
)  # fmt: skip
def test_what_the_cluster_would_refuse_is_told(wrong: str, said: str, cluster: Cluster, work: Path) -> None:
    done = dry(cluster, work, "cluster.nodes=16", wrong)
    assert done.returncode == 1 and said in done.stderr.lower(), done.stderr + done.stdout


def test_sweep_is_one_array_with_a_folder_a_run(cluster: Cluster, work: Path) -> None:
    place = ["cluster=slurm_cpu", "cluster.cpus_per_node=1", "cluster.launcher=srun", QUIET]
    done = cluster.run(
        sys.executable, SUBMIT, "-m", *TINY, *place, "optim.lr=1e-3,2e-3", "name=swept", cwd=work
    )
    assert done.returncode == 0, done.stdout + done.stderr
    number = done.stdout.partition("submitted: job ")[2].split()[0]
    runs = [work / "runs" / f"swept-lr_{rate}" for rate in ("0.001", "0.002")]
    for index, folder in enumerate(runs):
        assert cluster.wait(f"{number}_{index}", 200).state == "COMPLETED", done.stdout
        job = Job(cluster, number, folder)
        assert job.events == ["start", "done"] and job.step == 2
        assert {event["job"] for event in job.record if event["event"] == "start"} == {f"{number}_{index}"}
        assert f"lr: {float(folder.name.rpartition('_')[2])}" in (folder / "config.yaml").read_text()
    assert len(list((work / "runs" / "swept-sweep").glob("slurm-*.out"))) == 2


@pytest.mark.slurm_long
def test_warned_task_goes_on_alone(cluster: Cluster, work: Path) -> None:
    """One task has the number of the whole array: what is meant for it must not reach the other."""
    place = ["cluster=slurm_cpu", "cluster.cpus_per_node=1", "cluster.launcher=srun", QUIET]
    steps = ["+exp=tiny_cpu", "schedule.steps=400", "checkpoint.every=100", "log.eval_rows=0", "name=alone"]
    done = cluster.run(sys.executable, SUBMIT, "-m", *steps, *place, "optim.lr=1e-3,2e-3", cwd=work)
    assert done.returncode == 0, done.stdout + done.stderr
    number = done.stdout.partition("submitted: job ")[2].split()[0]
    jobs = [
        Job(cluster, f"{number}_{i}", work / "runs" / f"alone-lr_{r}")
        for i, r in enumerate(("0.001", "0.002"))
    ]
    whole = next(i for i in range(2) if cluster.show(f"{number}_{i}")["JobId"] == number)
    jobs[whole].wait_for_step(3)
    jobs[whole].warn()
    assert [job.wait().state for job in jobs] == ["COMPLETED"] * 2
    assert jobs[whole].events == ["start", "goes on", "start", "done"]
    assert jobs[1 - whole].events == ["start", "done"] and [job.step for job in jobs] == [400, 400]


def test_prepare_is_an_array_with_a_merge_behind_it(cluster: Cluster, work: Path) -> None:
    """Two tasks make the tokens that one process makes, those of the golden curve."""
    store = work / "data-array"
    text = [*RUN, f"data.path={HERE / 'text.jsonl'}", f"data.store={store}", "name=array"]
    done = cluster.run(
        sys.executable, SUBMIT, "prepare=2", *text, "cluster=slurm_cpu", "cluster.cpus_per_node=1", cwd=work
    )
    assert done.returncode == 0, done.stdout + done.stderr
    array, merge = re.findall(r"job (\d+)", done.stdout)[:2]
    logs = work / "runs" / "array"
    ended = cluster.wait(merge, 300)
    told = "".join(path.read_text() for path in sorted(logs.glob("*.out")))
    assert ended.state == "COMPLETED" and len(list(logs.glob(f"prepare-{array}_*.out"))) == 2, told
    assert json.loads(next(store.glob("*/store.json")).read_text())["content"] == stored("adamw").tokens


def test_merge_behind_a_failed_array_is_taken_back(cluster: Cluster, work: Path) -> None:
    """In place of waiting for ever."""
    text = ["+exp=tiny_cpu", "data=jsonl", f"data.path={work / 'broken.jsonl'}", "data.train_tokenizer=true"]
    text += ["data.vocab_size=272", "model.architecture.vocab_size=272"]
    (work / "broken.jsonl").write_text('{"other": 1}\n')
    done = cluster.run(
        sys.executable, SUBMIT, "prepare=2", *text, "cluster=slurm_cpu", "name=broken", cwd=work
    )
    assert done.returncode == 0, done.stdout + done.stderr
    array, merge = re.findall(r"job (\d+)", done.stdout)[:2]
    assert cluster.wait(merge, 300).state == "CANCELLED"
    assert cluster.wait(f"{array}_1", 60).state == "FAILED"


def test_script_submitted_by_hand(cluster: Cluster, work: Path) -> None:
    """Without Python on the side that submits; the run folder is asked of the settings on the node."""
    env = {"LAUNCHER": "srun", "PREFLIGHT_S": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    overrides = [*TINY, f"out={work / 'runs'}", "name=by_hand"]
    script = "launch/slurm/train.sbatch"
    options = ["--nodes=2", "--time=10", "--signal=B:USR1@60", f"--output={work}/by_hand.out"]
    job = cluster.submit(*options, script, *overrides, cwd=ROOT, env=env)
    assert cluster.wait(job, 200).state == "COMPLETED", (work / "by_hand.out").read_text()
    assert Job(cluster, job, work / "runs" / "by_hand").step == 2


def test_second_job_for_a_run_is_refused(cluster: Cluster, work: Path) -> None:
    job = submit(cluster, work, *TINY, "name=twice", 'cluster.extra=["--hold"]')
    with pytest.raises(AssertionError, match=f"belongs to job {job.number} .PENDING"):
        submit(cluster, work, *TINY, "name=twice")
    cluster.run("scancel", job.number)
