"""launch/slurm/train.sbatch with a fake scontrol, srun and torchrun: addresses, ranks, quoting, exit code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "launch" / "slurm" / "train.sbatch"
FAKES = {
    "scontrol": '[ "$1 $2 $3" = "show hostnames a[01-03,07],b1" ] && printf "%s\\n" a01 a02 a03 a07 b1',
    # every task gets its own number, and one failing task fails the step
    "srun": """while [ "$1" != bash ]; do shift; done
rc=0
for node in 0 1 2 3 4; do SLURM_NODEID=$node "$@" || rc=$?; done
exit $rc""",
    # the early warning of the time limit is for the ranks below torchrun, which would die of it
    "torchrun": 'kill -USR1 $$; printf "<%s>" "$@"; echo; [ "$SLURM_NODEID" != "$FAILING_NODE" ]',
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A folder as a project's, with the fakes before everything on the PATH."""
    for name, body in FAKES.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.py").write_text("")
    return {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "a[01-03,07],b1",
        "SLURM_NNODES": "5",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "64",
        "FAILING_NODE": "none",
    }


def submit(environ: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *overrides], env=environ, capture_output=True, text=True, timeout=30
    )


def test_each_node_gets_its_launcher(cluster: dict[str, str]) -> None:
    overrides = ["+exp=qwen3_1m", "name=a b", "engine.overrides={a:1,b:2}", "optim.lr=1e-5", "optim.lr=2e-5"]
    ended = submit(cluster, *overrides)
    assert ended.returncode == 0, ended.stderr
    common = "<--nproc-per-node=8><--master-addr=a01><--master-port=23456><launch/train.py>"
    tail = "".join(f"<{text}>" for text in overrides)
    assert ended.stdout.splitlines() == [
        f"<--nnodes=5><--node-rank={node}>{common}{tail}" for node in range(5)
    ]


def test_jobs_and_restarts_have_ports_of_their_own(cluster: dict[str, str]) -> None:
    again = [{}, {"SLURM_JOB_ID": "123457"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "9999"}]
    ports = [submit(cluster | changes).stdout.partition("--master-port=")[2][:5] for changes in again]
    assert ports == ["23456", "23457", "24456", "29999"]


def test_failures_are_passed_on(cluster: dict[str, str], tmp_path: Path) -> None:
    assert submit(cluster | {"FAILING_NODE": "3"}).returncode == 1
    assert submit(cluster | {"SLURM_JOB_NODELIST": "unknown"}).returncode != 0
    (tmp_path / "launch" / "train.py").unlink()
    ended = submit(cluster)
    assert ended.returncode == 2 and "submit from the project's folder" in ended.stderr


def test_directives_come_before_the_first_command() -> None:
    lines = SCRIPT.read_text().splitlines()
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [index for index, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert len(directives) == 6 and max(directives) < first_command
