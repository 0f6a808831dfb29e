"""The golden curve over two nodes, under every launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.curve import HERE, OPTIMIZERS, RUN, gap_of, read
from tests.golden.test_golden import excess, stored
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import QUIET, submit

pytestmark = pytest.mark.timeout(900)


LONG = pytest.mark.slurm_long


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("deepspeed", 2),
        ("torchrun", 2),
        pytest.param("deepspeed", 1, marks=LONG),  # as in test_hostfile.py
        pytest.param("torchrun", 1, marks=LONG),
        pytest.param("srun", 1, marks=LONG),
        pytest.param("srun", 2, marks=LONG),
    ],
)
def test_follows_the_golden_curve(launcher: str, ranks: int, cluster: Cluster, work: Path) -> None:
    """Two ranks share a row, one on each node or both on one; the run is one that a single process has made as well."""
    name, data = f"golden-{launcher}-{ranks}", work / f"data-{launcher}-{ranks}"
    places = [f"name={name}", f"data.store={data}", f"data.path={HERE / 'text.jsonl'}"]
    layout = ["parallel=sp2", "engine=zero3", "memory=lean", f"data.micro_batch={4 // ranks}"]
    nodes = [f"cluster.launcher={launcher}", f"cluster.ranks_per_node={ranks}", QUIET]
    job = submit(cluster, work, *RUN, *OPTIMIZERS["adamw"], *layout, *places, *nodes)
    ended = job.wait()
    assert (ended.state, ended.code, ended.restarts) == ("COMPLETED", 0, 0), job.log
    assert job.events == ["start", "done"]
    got = read(job.folder / "metrics.jsonl", data)
    assert got.tokens == stored("adamw").tokens
    assert not excess(gap_of(got, stored("adamw")), "adamw")
