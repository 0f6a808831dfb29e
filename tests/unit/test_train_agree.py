"""Work of rank 0 for all."""

from __future__ import annotations

import threading
from typing import Any

from stack.dist.agree import on_main, on_main_slowly
from stack.dist.topology import Topology
from stack.errors import DataError, StackError
from tests.unit.train_fakes import Ended, on_threads


def fail(error: Exception) -> Any:
    raise error


def test_value_of_rank_0_reaches_all_and_others_do_not_act() -> None:
    acted: list[int] = []

    def work(topology: Topology) -> str:
        return on_main(topology, lambda: acted.append(topology.rank) or f"from {topology.rank}")

    assert on_threads(3, work) == ["from 0"] * 3
    assert acted == [0]


def test_slow_work_sends_signs_of_life_until_it_is_done() -> None:
    beats: list[float] = []
    enough = threading.Event()

    def tell(seconds: float) -> None:
        beats.append(seconds)
        if len(beats) == 3:
            enough.set()

    def work(topology: Topology) -> int:
        return on_main_slowly(topology, lambda: 7 if enough.wait(20) else 0, tell, beat_s=0.01)

    assert on_threads(2, work) == [7, 7]
    assert len(beats) >= 3


def test_slow_work_may_have_no_value() -> None:
    assert on_threads(2, lambda topology: on_main_slowly(topology, lambda: None, lambda seconds: None)) == [
        None,
        None,
    ]


def test_slow_work_that_fails_raises_its_error_on_rank_0() -> None:
    def work(topology: Topology) -> Any:
        return on_main_slowly(topology, lambda: fail(DataError("no text")), lambda seconds: None, beat_s=0.01)

    first, second = on_threads(2, work)
    assert isinstance(first, DataError) and str(first) == "no text"
    assert isinstance(second, Ended)


def test_slow_work_that_never_ends_is_given_up() -> None:
    never = threading.Event()

    def work(topology: Topology) -> Any:
        return on_main_slowly(
            topology, lambda: never.wait(30), lambda seconds: None, beat_s=0.01, limit_s=0.03
        )

    first, _ = on_threads(2, work)
    assert isinstance(first, StackError) and "not ready" in str(first)
    never.set()
