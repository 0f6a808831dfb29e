"""NaN, inf and spikes: what each policy makes of them, and that going back leaves counters and data in order."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest

from stack.checkpoint.state import TrainState
from stack.config.schema_faults import FaultsConfig
from stack.errors import NonFiniteError, RollbackError, SpikeError
from stack.train.bad_steps import BadSteps, Verdict
from stack.train.loop import Job, train
from stack.train.metrics import Meter, Step, StepCounts
from tests.unit.train_fakes import NAN_LOSS, FakeEngine, FakeLoader, FakeMethod, batch_of, one_rank

GOOD, FAR = [3, 5, 7, 9], [3, 60, 60, 60]  # the loss of the second is above 20 times that of the first


def counted(skipped: str | None) -> Step:
    return Step(lr=0.1, counts=StepCounts(1, 1, 1), loss=1.0, skipped=skipped)


def test_spike_is_a_loss_above_so_many_times_the_median_of_enough_losses() -> None:
    judge = BadSteps(FaultsConfig(spike_factor=3, spike_min_steps=4), 3)
    state = TrainState(recent_losses=[1.0, 2.0, 2.0])
    assert judge.spike(state, 100.0) is None
    state.recent_losses.append(50.0)
    assert judge.spike(state, 6.0) is None
    assert judge.spike(state, 6.1) == "spike: loss 6.1000, above 3 times the median 2.0000 of the last 4"
    assert judge.spike(state, math.nan) is None
    assert BadSteps(FaultsConfig(), 3).spike(state, 1e9) is None


@pytest.mark.parametrize(
    "policy, in_row, limit, expected",
    [
        ("skip", 3, 3, None),
        ("skip", 4, 3, NonFiniteError),
        ("stop", 1, 3, NonFiniteError),
        ("rollback", 3, 3, None),
        ("rollback", 4, 3, [7, 8, 9, 10]),
        ("rollback", 1, 0, [10]),
    ],
)
def test_policies_for_nonfinite_steps(policy: Any, in_row: int, limit: int, expected: Any) -> None:
    judge = BadSteps(FaultsConfig(on_nonfinite=policy), limit)
    verdict = judge.judge(TrainState(step=10, nonfinite_in_row=in_row), counted("nonfinite loss on rank 1"))
    if expected is None:
        assert verdict is None
    elif isinstance(expected, list):
        assert verdict == Verdict(passed_over=expected)
    else:
        assert verdict is not None and isinstance(verdict.error, expected)


def test_policies_for_spikes() -> None:
    state, step = TrainState(step=10), counted("spike: loss 9")
    assert BadSteps(FaultsConfig(on_spike="skip"), 3).judge(state, step) is None
    assert BadSteps(FaultsConfig(on_spike="rollback"), 3).judge(state, step) == Verdict(passed_over=[10])
    stopped = BadSteps(FaultsConfig(on_spike="stop"), 3).judge(state, step)
    assert stopped is not None and isinstance(stopped.error, SpikeError)
    assert BadSteps(FaultsConfig(on_spike="stop"), 3).judge(state, counted(None)) is None


class Course:
    """A run of fakes that keeps a copy of everything behind each second step, and can go back to it."""

    def __init__(self, windows: list[list[int]], faults: FaultsConfig, **settings: Any):
        self.shown: list[dict[str, Any]] = []
        self.told: list[str] = []
        self.kept: list[tuple[TrainState, Any]] = []
        self.loader = FakeLoader([[batch_of(row)] for row in windows])
        self.job = Job(
            topology=one_rank(),
            engine=FakeEngine(one_rank()),
            method=FakeMethod(),
            loader=self.loader,
            lr_at=lambda step: 0.01 * (step + 1),
            rows_per_step=1,
            max_nonfinite_steps=1,
            faults=faults,
            go_back=self.go_back,
            settle=lambda: self.told.append("settled"),
            tell=self.told.append,
            **settings,
        )
        self.state = TrainState()

    def run(self) -> Course:
        train(self.job, self.state, 99, Meter(one_rank(), None), [self])
        return self

    def after_step(self, state: TrainState, record: dict[str, Any]) -> None:
        self.shown.append(record)
        if state.step % 2 == 0:
            self.kept.append((copy.deepcopy(state), self.job.engine.weight))

    def close(self) -> None:
        pass

    def go_back(self, state: TrainState, steps: list[int]) -> None:
        if state.rollbacks == 3:
            raise RollbackError("too often")
        found, self.job.engine.weight = next(kept for kept in self.kept[::-1] if kept[0].step < steps[0])
        loaded = replace(copy.deepcopy(found), rollbacks=state.rollbacks + 1)
        loaded.passed_over = sorted({*state.passed_over, *steps})
        state.__dict__.update(loaded.__dict__)
        self.loader.load_state(state.loader)

    def steps(self) -> list[int]:
        return [record["step"] for record in self.shown]


SPIKY = FaultsConfig(spike_factor=20, spike_min_steps=2)


def test_dropped_spike_leaves_the_weights_and_names_its_documents() -> None:
    course = Course([GOOD, GOOD, GOOD, FAR, GOOD], SPIKY).run()
    weight = Course([GOOD, GOOD, GOOD], SPIKY).run().job.engine.weight
    assert course.steps() == [1, 2, 3, 4, 5]
    assert course.shown[3]["skipped"].startswith("spike: loss")
    assert course.shown[3]["loss"] > 1 and course.state.dropped_steps == 1 and course.state.skipped_steps == 0
    assert course.told == ["step 4 read window 4"]
    assert len(course.state.recent_losses) == 4
    assert float(weight) != float(course.job.engine.weight)
    again = Course([GOOD, GOOD, GOOD, [0] * 4, GOOD], SPIKY).run()  # a step without targets drops the same
    assert float(again.job.engine.weight) == float(course.job.engine.weight)


def test_without_a_policy_a_spike_is_learned_from() -> None:
    plain = Course([GOOD, GOOD, GOOD, FAR, GOOD], FaultsConfig()).run()
    dropped = Course([GOOD, GOOD, GOOD, FAR, GOOD], SPIKY).run()
    assert plain.told == [] and plain.state.dropped_steps == 0
    assert float(plain.job.engine.weight) != float(dropped.job.engine.weight)


def test_going_back_passes_over_the_spike_and_shows_each_step_once() -> None:
    windows = [GOOD, GOOD, GOOD, GOOD, GOOD, FAR, GOOD, FAR, GOOD]
    course = Course(windows, replace(SPIKY, on_spike="rollback")).run()
    skipped = Course(windows, SPIKY).run()
    assert course.steps() == list(range(1, 10))
    assert [record["skipped"] for record in course.shown if record["skipped"]] == ["passed over"] * 2
    assert course.state.passed_over == [6, 8]
    assert (course.state.rollbacks, course.state.dropped_steps) == (2, 2)
    assert float(course.job.engine.weight) == float(skipped.job.engine.weight)
    assert [record["lr"] for record in course.shown] == [record["lr"] for record in skipped.shown]
    assert course.shown[-1]["tokens_total"] == skipped.shown[-1]["tokens_total"]


def test_going_back_behind_bad_steps_in_a_row_passes_over_all_of_them() -> None:
    bad = [NAN_LOSS, 1, 2, 3]
    course = Course([GOOD, GOOD, GOOD, bad, bad, GOOD], FaultsConfig(on_nonfinite="rollback")).run()
    assert course.steps() == [1, 2, 3, 4, 5, 6]
    assert course.state.passed_over == [4, 5]
    assert [record["skipped"] for record in course.shown] == [
        None, None, None, "nonfinite loss on rank 0", "passed over", None,
    ]  # fmt: skip
    assert course.state.nonfinite_in_row == 0 and math.isfinite(course.job.engine.weight)


def test_going_back_too_often_ends_the_run() -> None:
    windows = [GOOD, GOOD, GOOD, *[FAR] * 5]
    with pytest.raises(RollbackError, match="too often"):
        Course(windows, replace(SPIKY, on_spike="rollback")).run()


def test_stop_at_a_spike_comes_after_the_hooks_have_seen_it() -> None:
    course = Course([GOOD, GOOD, GOOD, FAR, GOOD], replace(SPIKY, on_spike="stop"))
    with pytest.raises(SpikeError, match="step 4: spike"):
        course.run()
    assert course.steps() == [1, 2, 3, 4]
    assert course.told == ["step 4 read window 4", "settled"]  # what is being saved is not lost
