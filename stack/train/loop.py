"""The step of training, and the loop around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from stack.checkpoint.state import TrainState
from stack.config.schema_faults import FaultsConfig
from stack.data.batch import MicroBatch
from stack.dist.topology import Topology
from stack.train.bad_steps import NONFINITE, PASSED, SPIKE, BadSteps, name_documents, remember_loss
from stack.train.hooks import CheckpointHook, EvaluationCut, EvaluationHook, Hook
from stack.train.metrics import FlopCounter, Meter, Step, Stopwatch, count_step


@dataclass
class Job:
    """What a step needs; `run.py` builds it."""

    topology: Topology
    engine: Any  # stack.engine.handle.Engine, or a fake with its methods
    method: Any  # stack.methods.base.Method
    loader: Loader
    lr_at: Callable[[int], float]
    """Learning rate of optimizer step k, counted from 0."""
    rows_per_step: int
    """Rows of a full step over all ranks; a step with fewer is counted as small."""
    max_nonfinite_steps: int
    flops: FlopCounter | None = None
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    go_back: Callable[[TrainState, list[int]], None] | None = None
    """Collective: puts everything, and the state given, back to a checkpoint before these steps, to be passed over."""
    settle: Callable[[], None] = lambda: None
    """Collective: returns once no save is under way."""
    wish: Callable[[], bool] = lambda: False
    """Whether this rank has been asked to stop the run."""
    enter: Callable[[str, str], None] = lambda kind, doing: None
    """Is told what comes next: its kind, and in words."""
    tell: Callable[[str], None] = print
    """Takes a line for the person at the console, on rank 0."""

    @property
    def bad_steps(self) -> BadSteps:
        return BadSteps(self.faults, self.max_nonfinite_steps)


class Loader(Protocol):
    """What the loop needs of a loader."""

    def next_step(self) -> list[MicroBatch] | None: ...
    def describe_last_step(self) -> list[str]: ...
    def state(self) -> dict[str, Any]: ...


def train_step(job: Job, state: TrainState) -> Step | None:
    """One window of data, one optimizer step; None at the end of the data, or if the ranks agree to stop before it.
    Collective."""
    watch = Stopwatch(job.topology.device)
    micro_batches = job.loader.next_step()
    wait_s = watch.since_start_s()
    if micro_batches is None:
        return None
    # Counted over all micro-batches and ranks before the first forward: the one denominator of loss and gradient.
    counts = count_step(job.method, micro_batches, job.topology, job.flops, job.wish(), wait_s)
    if counts.wishes:
        return None
    step = Step(lr=job.lr_at(state.step), counts=counts)
    watch.lap("data_s")
    if state.step + 1 in state.passed_over:
        step.skipped = PASSED
    elif not counts.targets:
        step.skipped = "no targets"
    else:
        loss_sum_local = forward_backward(job, micro_batches, counts.targets)
        loss_sum, wishes = job.topology.sum_each([loss_sum_local, float(job.wish())])
        step.loss, step.stop = loss_sum / counts.targets, wishes > 0
        watch.lap("forward_backward_s")
        if (spike := job.bad_steps.spike(state, step.loss)) is not None:
            spoil(job, micro_batches[-1])
        update_weights(job, step, loss_sum_local)
        step.skipped = spike or step.skipped
        watch.lap("optimizer_s")
    step.times_s = watch.laps()
    advance(job, state, step)
    return step


def forward_backward(job: Job, micro_batches: Sequence[MicroBatch], num_targets: int) -> float:
    """Gradients of the step's mean loss; returns the sum of the token losses of this rank's slices."""
    sums = [job.engine.forward_backward(job.method, batch, num_targets) for batch in micro_batches]
    return float(torch.stack(sums).double().sum())  # the one wait for the device before the update


def spoil(job: Job, batch: MicroBatch) -> None:
    """Make the step's gradients NaN, so that the engine drops them: no ZeRO stage offers a way to do so directly."""
    job.engine.forward_backward(job.method, batch, math.nan)


def update_weights(job: Job, step: Step, loss_sum_local: float) -> None:
    """Clip and step. Where a loss or gradient is NaN or inf the engine leaves the weights alone; say where it was."""
    result = job.engine.step(step.lr)
    step.grad_norm, step.loss_scale = result.grad_norm, result.loss_scale
    step.clipped = result.clipped and not result.skipped
    assert step.loss is not None
    if not math.isfinite(step.loss):
        finite = job.topology.gather_objects(math.isfinite(loss_sum_local))
        ranks = [str(rank) for rank, good in enumerate(finite) if not good]
        step.skipped = f"{NONFINITE} loss on rank {', '.join(ranks)}"
    elif result.skipped == "loss-scale":
        step.skipped = result.skipped
    elif result.skipped:
        step.skipped = f"{NONFINITE} gradient, summed over all ranks"


def advance(job: Job, state: TrainState, step: Step) -> None:
    """Count the step. Every window of data is a step, also a skipped one, so that the order of the data and the
    learning rate depend on the step number alone."""
    reason = step.skipped or ""
    state.step += 1
    state.tokens += step.counts.tokens
    state.targets += step.counts.targets
    state.small_steps += step.counts.rows < job.rows_per_step
    state.empty_steps += reason == "no targets"
    state.overflow_steps += reason == "loss-scale"
    state.dropped_steps += reason.startswith((SPIKE, PASSED))
    if reason.startswith(NONFINITE):
        state.skipped_steps += 1
        state.nonfinite_in_row += 1
    elif not reason:
        state.nonfinite_in_row = 0
    remember_loss(state, step)
    state.loader = job.loader.state()


def train(job: Job, state: TrainState, total_steps: int, meter: Meter, hooks: Sequence[Hook]) -> bool:
    """Steps until `total_steps`, the end of the data, or the agreement to stop; returns whether it was that.

    A rank whose `job.wish` is set stops all of them: before a step that has not begun, else behind it. Raises
    NonFiniteError or SpikeError behind a step that `job.faults` does not let pass, once the hooks have seen it.
    """
    if state.pending_record:
        record, state.pending_record = state.pending_record, {}
        saving = [hook for hook in hooks if isinstance(hook, CheckpointHook)]
        if not call_hooks(job, state, record, [hook for hook in hooks if hook not in saving]):
            return True
        for hook in saving:
            job.enter("save", f"in the save behind step {state.step}")
            hook.save(state, record)  # in place of the checkpoint whose record was not complete
    seen = state.step  # steps that were taken again after going back are not shown again
    while state.step < total_steps:
        job.enter("step", f"in step {state.step + 1}")
        step = train_step(job, state)
        if step is None:
            break
        if job.topology.is_main:
            name_documents(state, step, job.loader.describe_last_step, job.tell)
        verdict = job.bad_steps.judge(state, step)
        if verdict is not None and verdict.passed_over is not None:
            assert job.go_back is not None
            job.enter("rollback", f"going back from step {state.step}")
            job.go_back(state, verdict.passed_over)
            continue
        again = state.step <= seen
        seen = max(seen, state.step)
        called = [hook for hook in hooks if not again or isinstance(hook, CheckpointHook)]
        if not call_hooks(job, state, meter.record(state, step), called):
            return True
        if verdict is not None and verdict.error is not None:
            job.enter("end", f"behind step {state.step}")
            job.settle()  # what is being saved is not lost
            raise verdict.error
        if step.stop:
            return True
    return job.topology.sum(int(job.wish())) > 0


def call_hooks(job: Job, state: TrainState, record: dict[str, Any], hooks: Sequence[Hook]) -> bool:
    """Show the step to the hooks, one after the other. False: an evaluation was cut short because the run is to stop, and
    the record waits in the state for a resumed run to complete it."""
    try:
        for hook in hooks:
            kind = {EvaluationHook: "evaluation", CheckpointHook: "save"}.get(type(hook), "logging")
            job.enter(kind, f"in the {kind} behind step {state.step}")
            hook.after_step(state, record)
    except EvaluationCut:
        state.pending_record = record
        return False
    return True
