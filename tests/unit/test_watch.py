"""The watch over a rank: what takes too long, where it stands, and what the kernel killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from stack.dist import watch as module
from stack.dist.env import RankEnv
from stack.dist.hub import Hub, Peer, died
from stack.dist.oom_kills import count_oom_kills
from stack.dist.watch import FACTOR, FIRST, Watch

ENV = RankEnv(1, 2, 1, 2, "127.0.0.1", 1, "plain")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def ctime(self) -> str:
        return "now"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_long_first_steps_are_let_pass_and_later_ones_judged_by_the_median(
    clock: Clock, tmp_path: Path
) -> None:
    watch = Watch(ENV)
    clock.now += 1e6
    assert watch.overdue() is None  # not armed
    watch.arm(10, tmp_path)
    clock.now += FIRST * 10 - 1
    assert watch.overdue() is None
    watch.enter("step", "in step 1")
    clock.now += FIRST * 10 - 1  # compiles
    assert watch.overdue() is None
    for step in range(2, 6):
        watch.enter("step", f"in step {step}")
        clock.now += 3
    assert watch.overdue() is None
    clock.now += FACTOR * 3 - 4
    assert watch.overdue() is None
    clock.now += 2
    assert watch.overdue() == "error: no end within 30 s in step 5 on rank 1 of 2 (faults.watchdog_s=10)"
    for seconds in (0.001, FIRST * 10 - 1, 0.001, FACTOR * (FIRST * 10 - 1) - 1):  # saves on a slow disk
        watch.enter("save", "in the save behind step 5")
        clock.now += seconds
        assert watch.overdue() is None
    clock.now += 2
    assert watch.overdue() is not None
    watch.disarm()
    clock.now += 1e6
    assert watch.overdue() is None


def test_short_steps_have_the_whole_limit(clock: Clock, tmp_path: Path) -> None:
    watch = Watch(ENV)
    watch.arm(10, tmp_path)
    for step in range(1, 30):
        watch.enter("step", f"in step {step}")
        clock.now += 0.01
    clock.now += 9.9
    assert watch.overdue() is None
    clock.now += 0.2
    assert watch.overdue() is not None


def test_zero_is_off(clock: Clock, tmp_path: Path) -> None:
    watch = Watch(ENV)
    watch.arm(0, tmp_path)
    clock.now += 1e9
    assert watch.overdue() is None


def test_stacks_go_into_the_ranks_file(tmp_path: Path) -> None:
    watch = Watch(ENV)
    watch.arm(10, tmp_path / "stacks")
    watch.enter("step", "in step 7")
    said = watch.dump()
    text = (tmp_path / "stacks" / "rank_1.txt").read_text()
    assert "in step 7" in said and str(tmp_path / "stacks") in said
    assert "in step 7" in text and "test_stacks_go_into_the_ranks_file" in text
    (tmp_path / "file").write_text("")
    watch.arm(10, tmp_path / "file")
    assert "could not be written" in watch.dump()


@pytest.mark.parametrize(
    "lines, file, text",
    [
        ("0::/job/step", "sys/fs/cgroup/job/step/memory.events", "low 0\noom 4\noom_kill 3\n"),
        ("0::/outside", "sys/fs/cgroup/memory.events", "oom_kill 3\n"),
        ("4:memory:/job\n0::/", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n"),
        ("0::/", "proc/vmstat", "nr_free 5\noom_kill 3\n"),
    ],
)
def test_kills_for_want_of_memory_are_counted(lines: str, file: str, text: str, tmp_path: Path) -> None:
    for name, content in (("proc/self/cgroup", lines), (file, text)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert count_oom_kills(tmp_path) == 3


def test_nothing_to_read_counts_as_none(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path) == 0


def test_death_of_a_rank_on_a_node_with_such_a_kill_is_told_with_advice() -> None:
    watch = Watch(RankEnv(0, 2, 0, 2, "127.0.0.1", 1, "plain"))
    watch.memory_advice = lambda: "Fix: less"
    hub = Hub(watch.env, watch)
    for rank, host, kills in ((0, "a", 0), (1, "b", 0), (2, "b", 1), (3, "c", 5)):
        peer = Peer(None)  # type: ignore[arg-type]  not spoken to
        peer.rank, peer.host, peer.oom_kills = rank, host, kills
        hub.peers[rank] = peer
    assert hub._memory_note() == ""
    hub.dead = hub.peers[1]
    assert "killed 1 process(es) there" in hub._memory_note() and "Fix: less" in hub._memory_note()
    hub.dead = hub.peers[0]
    assert hub._memory_note() == ""
    hub.server.close()
    assert died(1, 4, "b", "in step 3").startswith(
        "error: rank 1 of 4 on b ended without a message in step 3:"
    )
