"""Nodes that are lost under a run: it goes on by itself on those that are left, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.kills import Siege
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import submit
from tests.slurm.test_life import run

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slurm_long]
LOST_S = 300  # Slurm gives a node up 10 to 35 s after its last word, ends the job, and holds it for 11 s


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Two nodes and a spare."""
    with Cluster(nodes=3) as started:
        yield started


@pytest.fixture(scope="module")
def siege(three: Cluster, work: Path) -> Siege:
    place = work / "nodes"
    place.mkdir()
    ended = run(three, place, "whole").wait()
    assert ended.state == "COMPLETED"
    return Siege(place, None, 0)  # type: ignore[arg-type]  nothing is forked here


@pytest.mark.parametrize(("node", "how"), [("node2", "crash"), ("node1", "crash"), ("node2", "cut")])
def test_lost_node_is_replaced_by_the_spare(node: str, how: str, siege: Siege, three: Cluster) -> None:
    """Its power or its network; node1 is the batch host, which has the shell and rank 0."""
    three.wait_idle(60)
    job = run(three, siege.folder, f"{how}-{node}")
    job.wait_for_step(5)
    assert three.show(job.number)["NodeList"] == "node[1-2]"
    getattr(three, how)(node)
    try:
        job.wait_for_start(2, LOST_S)
        places = [event["nodes"] for event in job.record if event["event"] == "start"]
        assert places == ["node[1-2]", "node[1,3]" if node == "node2" else "node[2-3]"]
        ended = job.wait()
    finally:
        {"crash": three.boot, "cut": three.join}[how](node)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), job.log
    assert job.events.count("start") == 2 and job.events[-1] == "done"
    siege.check_outcome(job.folder.name)


def test_drained_node_finishes_its_job(siege: Siege, three: Cluster) -> None:
    three.wait_idle(90)
    job = run(three, siege.folder, "drained")
    job.wait_for_step(3)
    three.run("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=test")
    ended = job.wait()
    three.run("scontrol", "update", "NodeName=node1", "State=RESUME")
    assert (ended.state, ended.restarts) == ("COMPLETED", 0)
    siege.check_outcome("drained")


def test_node_set_down_restarts_the_job(siege: Siege, three: Cluster) -> None:
    three.wait_idle(90)
    job = run(three, siege.folder, "down")
    job.wait_for_step(3)
    three.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    job.wait_for_start(2, LOST_S)
    assert job.wait().state == "COMPLETED"
    three.run("scontrol", "update", "NodeName=node2", "State=RESUME")
    siege.check_outcome("down")


def test_lost_nodes_do_not_loop(three: Cluster, work: Path) -> None:
    """Two starts that are lost before a checkpoint: the third gives up, in place of costing nodes for ever."""
    three.wait_idle(90)
    more = [
        "+exp=tiny_cpu",
        "parallel.sp=2",
        "schedule.steps=100000",
        "checkpoint=none",
        "cluster.preflight=false",
    ]
    job = submit(three, work, *more, "name=lost", "cluster.exclude=node3")
    for number in (1, 2):
        job.wait_for_start(number, LOST_S)
        three.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
        three.run("scontrol", "update", "NodeName=node2", "State=RESUME")
    assert job.wait(LOST_S).state == "FAILED"
    # The shell of a start may still have heard of the failure.
    assert job.events.count("start") == 2 and job.events[-1] == "gave_up"
