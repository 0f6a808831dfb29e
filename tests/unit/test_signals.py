"""Signals: what they do before, during and after the steps, and what forked workers make of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from stack.dist import signals
from stack.dist.signals import NUMBERS, Stopped, StopSignals


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    opened = StopSignals()
    opened.open()
    yield opened
    opened.close()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_before_the_steps_a_signal_ends_the_run_at_once(stop: StopSignals, number: int) -> None:
    with pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name}") as caught:
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == 128 + number
    heard = stop.heed()  # the thread hears of it as well, for a main thread inside a collective
    assert heard is not None and heard.exit_code == 128 + number and not heard.again
    assert stop.wish is None


@pytest.mark.parametrize("number", NUMBERS)
def test_during_the_steps_the_first_is_a_wish(stop: StopSignals, number: int) -> None:
    stop.defer()
    os.kill(os.getpid(), number)
    assert stop.heed() is None
    assert stop.wish == signal.Signals(number).name


def test_one_ctrl_c_that_comes_twice_is_one_wish_and_a_later_signal_ends_the_run(
    stop: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop.defer()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.heed() is None and stop.wish == "SIGINT"
    monkeypatch.setattr(signals, "SAME_S", -1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    ending = stop.heed()
    assert ending is not None and ending.again and ending.exit_code == 143
    assert "second signal" in str(ending)


def test_after_the_end_signals_change_nothing(stop: StopSignals) -> None:
    stop.defer()
    stop.ignore()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.heed() is None and stop.wish is None
    stop.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a launcher passes signals on late


def test_launcher_that_is_gone_is_a_wish_during_the_steps_alone(stop: StopSignals) -> None:
    assert not stop.ask("gone") and stop.wish is None
    stop.defer()
    assert stop.ask("gone") and stop.wish == "gone"
    stop.undefer()
    assert not stop.ask("gone")


def test_forked_worker_is_ended_by_sigterm_alone_and_its_parent_hears_nothing(stop: StopSignals) -> None:
    stop.defer()
    worker = os.fork()
    if worker == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    assert stop.heed() is None and stop.wish is None


def test_handler_of_a_forked_worker_s_own_is_not_heard_by_its_parent(stop: StopSignals) -> None:
    stop.defer()
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitpid(worker, 0)[1] == 0
    assert stop.heed() is None and stop.wish is None
