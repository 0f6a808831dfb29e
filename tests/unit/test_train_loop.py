"""The step: one denominator for all ranks and micro-batches, skipped and empty steps, counters, learning rate."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import pytest

from stack.checkpoint.state import TrainState
from stack.dist.topology import Topology
from stack.errors import NonFiniteError
from stack.parallel.shard_batch import shard_batch
from stack.train.hooks import CheckpointHook, EvaluationHook
from stack.train.loop import Job, train, train_step
from stack.train.metrics import Meter
from tests.unit.train_fakes import (
    NAN_GRADIENT,
    NAN_LOSS,
    FakeEngine,
    FakeLoader,
    FakeMethod,
    batch_of,
    on_threads,
    one_rank,
)

# Four samples with 1, 5, 9 and 2 targets.
SAMPLES = [
    [3, 5, 0, 0, 0, 0, 0, 0, 0, 0],
    [2, 4, 6, 8, 10, 12, 0, 0, 0, 0],
    [9, 1, 9, 2, 9, 3, 9, 4, 9, 5],
    [7, 20, 30, 0, 0, 0, 0, 0, 0, 0],
]
EMPTY = [0] * 10


def make_job(topology: Topology, windows: list[list[Any]], **settings: Any) -> Job:
    engine = FakeEngine(topology, loss_scale=settings.pop("loss_scale", None))
    values = {"lr_at": lambda step: 0.1 * (step + 1), "rows_per_step": 1, "max_nonfinite_steps": 3} | settings
    return Job(topology=topology, engine=engine, method=FakeMethod(), loader=FakeLoader(windows), **values)


class Recorder:
    """A hook that keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def after_step(self, state: TrainState, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def run(job: Job, steps: int) -> list[dict[str, Any]]:
    recorder = Recorder()
    train(job, TrainState(), steps, Meter(job.topology, None), [recorder])
    return recorder.records


LAYOUTS = {
    "accumulation 4": (1, 1, [[[0], [1], [2], [3]]]),
    "batch 4": (1, 1, [[[0, 1, 2, 3]]]),
    "dp 2, accumulation 2": (2, 1, [[[0], [1]], [[2], [3]]]),
    "dp 2, uneven": (2, 1, [[[0], [1], [2]], [[3], ["empty"], ["empty"]]]),
    "sp 2, accumulation 4": (2, 2, [[[0], [1], [2], [3]], [[0], [1], [2], [3]]]),
}


def split_step(topology: Topology, windows: list[list[list[Any]]]) -> tuple[float, Any]:
    whole = [
        batch_of(*(EMPTY if i == "empty" else SAMPLES[i] for i in rows)) for rows in windows[topology.rank]
    ]
    job = make_job(topology, [[shard_batch(batch, topology.sp, topology.sp_rank) for batch in whole]])
    step = train_step(job, TrainState())
    assert step is not None
    return float(job.engine.weight), step


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_weight_and_counts_do_not_depend_on_the_split(name: str) -> None:
    world, sp, windows = LAYOUTS[name]
    targets = [token for sample in SAMPLES for token in sample[1:] if token]
    expected_loss = sum((1 - target) ** 2 / 100 for target in targets) / 17
    gradient = sum((1 - target) / 50 for target in targets) / 17
    for weight, step in on_threads(world, lambda topology: split_step(topology, windows), sp):
        assert step.counts.targets == 17
        assert step.counts.tokens == 21
        assert step.counts.rows == 4
        assert step.loss == pytest.approx(expected_loss, rel=1e-6)
        assert step.grad_norm == pytest.approx(abs(gradient), rel=1e-9)
        assert weight == pytest.approx(1 - 0.1 * gradient, rel=1e-9)


def test_the_wait_for_rows_is_in_the_record_and_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(one_rank(), [[batch_of(SAMPLES[0])]])
    plain = job.loader.next_step

    def slowly() -> Any:
        time.sleep(0.05)
        return plain()

    monkeypatch.setattr(job.loader, "next_step", slowly)
    record = run(job, 1)[0]
    assert 0.05 <= record["data_wait_s"] <= record["data_s"] + 1e-3 and record["data_s"] <= record["step_s"]


def test_targets_are_counted_before_the_first_forward() -> None:
    job = make_job(one_rank(), [[batch_of(SAMPLES[0]), batch_of(SAMPLES[2])]])
    train_step(job, TrainState())
    assert job.engine.calls == ["forward of 10", "forward of 10", "step 0.1"]


def test_learning_rate_is_a_function_of_the_step_alone_also_past_skipped_and_empty_steps() -> None:
    good, bad, empty = batch_of(SAMPLES[1]), batch_of([NAN_LOSS, 1, 2]), batch_of(EMPTY)
    job = make_job(one_rank(), [[good], [bad], [empty], [good]])
    records = run(job, 4)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["lr"] for record in records] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert job.engine.calls[-1] == "step 0.4"


def test_step_without_a_target_changes_nothing_and_is_counted() -> None:
    job, state = make_job(one_rank(), [[batch_of(EMPTY), batch_of(EMPTY)]]), TrainState()
    step = train_step(job, state)
    assert step is not None
    assert (step.loss, step.skipped, job.engine.calls) == (None, "no targets", [])
    assert (state.step, state.empty_steps, state.skipped_steps, state.nonfinite_in_row) == (1, 1, 0, 0)


def nan_on_rank_1(topology: Topology) -> Any:
    row = [NAN_LOSS, 1, 2] if topology.rank == 1 else [4, 1, 2]
    job, state = make_job(topology, [[batch_of(row)], [batch_of([4, 1, 2])]]), TrainState()
    steps = [train_step(job, state), train_step(job, state)]
    return [step.skipped for step in steps if step], state, float(job.engine.weight)


def test_nan_loss_is_skipped_counted_and_its_rank_named() -> None:
    results = on_threads(2, nan_on_rank_1)
    for skipped, state, weight in results:
        assert skipped == ["nonfinite loss on rank 1", None]
        assert (state.step, state.skipped_steps, state.nonfinite_in_row) == (2, 1, 0)
        assert math.isfinite(weight) and weight != 1.0
    assert results[0][2] == results[1][2]


def test_nan_gradient_with_a_finite_loss_is_skipped_and_counted() -> None:
    job, state = make_job(one_rank(), [[batch_of([NAN_GRADIENT, 1, 2])]]), TrainState()
    step = train_step(job, state)
    assert step is not None and step.skipped is not None
    assert step.skipped.startswith("nonfinite gradient")
    assert not step.clipped
    assert (state.skipped_steps, state.nonfinite_in_row, float(job.engine.weight)) == (1, 1, 1.0)


def test_step_skipped_by_the_loss_scaler_is_not_held_against_the_run() -> None:
    windows = [[batch_of([NAN_GRADIENT, 1, 2])] for _ in range(6)]
    job = make_job(one_rank(), windows, loss_scale=1024.0, max_nonfinite_steps=0)
    records = run(job, 6)
    assert len(records) == 6
    assert records[-1]["overflow_steps"] == 6
    assert records[-1]["skipped_steps"] == 0
    assert records[-1]["loss_scale"] == 1024.0


@pytest.mark.parametrize("limit, steps_run", [(0, 1), (2, 3)])
def test_run_stops_after_too_many_bad_steps_in_a_row_and_hooks_see_the_last(
    limit: int, steps_run: int
) -> None:
    windows = [[batch_of([NAN_LOSS, 1, 2])] for _ in range(9)]
    job, recorder = make_job(one_rank(), windows, max_nonfinite_steps=limit), Recorder()
    with pytest.raises(NonFiniteError, match=f"step {steps_run}: nonfinite loss on rank 0"):
        train(job, TrainState(), 9, Meter(job.topology, None), [recorder])
    assert len(recorder.records) == steps_run
    assert recorder.records[-1]["loss"] is None  # NaN is no JSON


def test_good_step_resets_the_count_of_bad_ones_in_a_row() -> None:
    good, bad = [batch_of(SAMPLES[1])], [batch_of([NAN_LOSS, 1, 2])]
    records = run(make_job(one_rank(), [bad, bad, good, bad, bad, good], max_nonfinite_steps=2), 6)
    assert records[-1]["skipped_steps"] == 4


def test_incomplete_last_window_is_a_smaller_step_and_counted() -> None:
    windows = [[batch_of(SAMPLES[1])] * 4, [batch_of(SAMPLES[1])] * 2 + [batch_of(EMPTY)] * 2]
    job = make_job(one_rank(), windows, rows_per_step=4)
    records = run(job, 5)  # the data ends first
    assert [record["rows"] for record in records] == [4, 2]
    assert [record["small_steps"] for record in records] == [0, 1]
    assert job.engine.calls == ["forward of 20"] * 4 + ["step 0.1"] + ["forward of 10"] * 4 + ["step 0.2"]
    assert records[1]["targets_total"] == 30


@pytest.mark.parametrize(("every", "expected"), [(0, []), (2, [(3, {"eval_loss": 2.0}, {})])])
def test_a_record_that_waited_for_its_evaluation_is_completed_and_its_step_saved_again(
    every: int, expected: list[Any]
) -> None:
    """Else the evaluation is in no manifest, and is lost when a longer run shows the record anew."""

    class Saves:
        def save(self, engine: Any, state: TrainState, metrics: dict[str, float]) -> None:
            saved.append((state.step, metrics, state.pending_record))

    saved: list[Any] = []
    evaluations: list[Any] = [None, {"eval_loss": 2.0}]
    recorder, saver = Recorder(), cast(Any, Saves())
    hooks = [
        EvaluationHook(lambda: evaluations.pop(0), 3, 3),
        recorder,
        CheckpointHook(saver, None, every, False, 3),
    ]
    job, state = make_job(one_rank(), []), TrainState(step=3, pending_record={"step": 3})
    meter = Meter(one_rank(), None)
    assert train(job, state, 3, meter, hooks) and state.pending_record == {"step": 3} and not saved
    assert not train(job, state, 3, meter, hooks) and state.pending_record == {}
    assert recorder.records == [{"step": 3, "eval_loss": 2.0}] and saved == expected
