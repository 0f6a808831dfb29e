"""Clusters that are not fit for training: the preflight names the node, and no training starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ROOT

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 40
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
set -euo pipefail
PROJECT={ROOT} LAUNCHER=srun RANKS_PER_NODE=1 RESTART=none PREFLIGHT_S={LIMIT_S}
source {Path(sys.executable).parent}/activate
source "$PROJECT/launch/slurm/job.sh"
train() {{ echo trained; }}
run_job
"""
"""The way of a job, with nothing to train."""


@pytest.fixture
def start(cluster: Cluster, work: Path, request: pytest.FixtureRequest) -> Callable[..., tuple[int, str]]:
    """Runs the preflight; exit code and output of the job."""

    def run(*options: str, **env: str) -> tuple[int, str]:
        folder = work / request.node.name
        folder.mkdir(exist_ok=True)
        (folder / "job.sh").write_text(SCRIPT)
        env = {"RUN_FOLDER": str(folder), "DS_ACCELERATOR": "cpu", **env}
        job = cluster.submit(*options, f"--output={folder}/out", str(folder / "job.sh"), env=env)
        ended = cluster.wait(job, LIMIT_S + 60)
        return ended.code, (folder / "out").read_text()

    return run


def test_two_nodes_are_fine(start: Callable[..., tuple[int, str]], work: Path) -> None:
    code, output = start()
    assert code == 0 and "2 node(s), 2 rank(s) are fine" in output and output.count("trained") == 1, output
    findings = json.loads((work / "test_two_nodes_are_fine" / "preflight.json").read_text())
    assert list(findings["nodes"]) == ["node1", "node2"] and findings["faults"] == []
    assert set(findings["bytes/s"]) == {"all-reduce over all ranks", "all-to-all over all ranks"}
    assert all(rate > 1e5 for rate in findings["bytes/s"].values())


def refused(code: int, output: str, *said: str) -> None:
    assert code == 1 and "trained" not in output, output
    for text in said:
        assert text in output, output


def test_faults_of_one_node_are_named(
    start: Callable[..., tuple[int, str]], cluster: Cluster, work: Path
) -> None:
    """Another version of a package, and a run folder that cannot be written there: both at once."""
    packages, folder = work / "packages", work / "test_faults_of_one_node_are_named"
    for path in (packages, folder):
        path.mkdir(exist_ok=True)
    other = work / "others" / "tokenizers-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenizers\nVersion: 0.0.1\n")
    cluster.inside("node2", "mount", "--bind", str(other.parent), str(packages))
    cluster.inside("node2", "mount", "--bind", "-o", "ro", str(folder), str(folder))
    try:
        code, output = start(PYTHONPATH=str(packages))
    finally:
        cluster.inside("node2", "umount", str(folder))
        cluster.inside("node2", "umount", str(packages))
    refused(code, output, "preflight found 2 fault(s)", f"node2: the run folder {folder} cannot be written: ")
    assert "tokenizers differs: node2 has 0.0.1; node1 has " in output


def test_folder_that_is_not_shared_is_named(
    start: Callable[..., tuple[int, str]], cluster: Cluster, work: Path
) -> None:
    folder = work / "test_folder_that_is_not_shared_is_named"
    folder.mkdir()
    cluster.inside("node2", "mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(folder))
    try:
        code, output = start()
    finally:
        cluster.inside("node2", "umount", str(folder))
    refused(code, output, "node2: what it wrote into", "is not seen from node1: the folder is not shared")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("localhost", "MASTER_ADDR=localhost cannot be reached from 2 nodes"),
        ("node2", "which is no address of node1, where rank 0 is"),
    ],
)
def test_wrong_address_is_named(address: str, said: str, start: Callable[..., tuple[int, str]]) -> None:
    refused(*start(HEAD_ADDRESS=address), said)


def test_no_environment_and_fewer_cpus_than_ranks(cluster: Cluster, work: Path) -> None:
    """As where a site sets SBATCH_EXPORT=NONE, and a job that asked for no CPUs gets one."""
    folder = work / "bare"
    folder.mkdir()
    given = f"RUN_FOLDER={folder} RANKS_PER_NODE=2\nexport DS_ACCELERATOR=cpu\nrun_job\n"
    (folder / "job.sh").write_text(SCRIPT.replace("run_job\n", given))
    options = ["--export=NONE", "--cpus-per-task=1", f"--output={folder}/out"]
    ended = cluster.wait(cluster.submit(*options, str(folder / "job.sh")), LIMIT_S + 60)
    output = (folder / "out").read_text()
    assert ended.code == 0 and "2 node(s), 4 rank(s) are fine" in output, output


def test_two_jobs_at_once_on_the_same_nodes(cluster: Cluster, work: Path) -> None:
    (work / "job.sh").write_text(SCRIPT)
    jobs, folders = [], [work / "one", work / "two"]
    for folder in folders:
        folder.mkdir()
        options = ["--cpus-per-task=1", f"--output={folder}/out"]
        env = {"RUN_FOLDER": str(folder), "DS_ACCELERATOR": "cpu"}
        jobs.append(cluster.submit(*options, str(work / "job.sh"), env=env))
    outputs = []
    for job, folder in zip(jobs, folders, strict=True):
        assert cluster.wait(job, 120).code == 0
        outputs.append((folder / "out").read_text())
    assert all("2 rank(s) are fine" in output for output in outputs)
    assert len({output.partition("rank 0 at ")[2].partition(",")[0] for output in outputs}) == 2
