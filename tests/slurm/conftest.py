"""One cluster for all tests, and where they are left out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing

LONG = "LONG_SEQUENCE_SLURM_LONG"
BIG = """\
NodeName=big[1-16] NodeAddr=127.0.0.1 Port=1 CPUs=128 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=big Nodes=big[1-16] MaxTime=2-0 State=UP
ResumeProgram=/bin/true
SuspendProgram=/bin/true"""
"""Sixteen nodes that cost nothing, since they are not there: for `sbatch --test-only` alone."""
PREEMPTION = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=cheap Nodes=node[1-2] PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=dear Nodes=node[1-2] PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if item.path.is_relative_to(here)]
    reason = missing() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.slurm)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("slurm_long") and LONG not in os.environ:
            item.add_marker(pytest.mark.skip(reason=f"minutes long: {LONG}=1 runs it"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, cpus=2, extra=f"{BIG}\n{PREEMPTION}") as started:
        yield started


@pytest.fixture(scope="session")
def work() -> Iterator[Path]:
    """Where runs are submitted from; its path is short, and other users could search it."""
    with tempfile.TemporaryDirectory(prefix="slurm-work-") as folder:
        yield Path(folder).resolve()
