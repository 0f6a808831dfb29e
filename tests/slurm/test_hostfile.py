"""Without Slurm: the same two machines, and `deepspeed --hostfile` on each of them, as README tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.curve import HERE, OPTIMIZERS, RUN, gap_of, read
from tests.golden.test_golden import excess, stored
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ROOT

pytestmark = pytest.mark.timeout(900)
DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")
TRAIN = str(ROOT / "launch" / "train.py")


def start(cluster: Cluster, work: Path, hostfile: str, *overrides: str) -> list[tuple[int, str]]:
    """The command on each node; exit codes and outputs."""
    started = []
    for rank, node in enumerate(cluster.names):
        command = [
            DEEPSPEED,
            f"--hostfile={hostfile}",
            "--no_ssh",
            f"--node_rank={rank}",
            "--master_addr=node1",
        ]
        started.append(
            subprocess.Popen(
                [
                    *cluster.enter(node),
                    "env",
                    f"--chdir={work}",
                    *command,
                    "--master_port=29700",
                    TRAIN,
                    *overrides,
                ],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=600)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def test_hostfile_without_ssh_follows_the_golden_curve(cluster: Cluster, work: Path) -> None:
    (work / "hosts").write_text("".join(f"{node} slots=1\n" for node in cluster.names))
    layout = ["parallel=sp2", "engine=zero3", "memory=lean", "data.micro_batch=4", "name=hostfile"]
    places = [f"data.store={work / 'data-hostfile'}", f"data.path={HERE / 'text.jsonl'}"]
    ended = start(cluster, work, "hosts", *RUN, *OPTIMIZERS["adamw"], *layout, *places)
    assert [code for code, _ in ended] == [0, 0], ended
    got = read(work / "runs" / "hostfile" / "metrics.jsonl", work / "data-hostfile")
    assert not excess(gap_of(got, stored("adamw")), "adamw")


def test_missing_hostfile_is_no_run_on_one_machine(cluster: Cluster, work: Path) -> None:
    ended = start(cluster, work, "nowhere", "+exp=tiny_cpu", "name=nowhere")
    assert all(code for code, _ in ended), ended
    assert "--hostfile nowhere: there is no such file" in ended[0][1], ended
    assert not (work / "runs" / "nowhere" / "metrics.jsonl").exists()
