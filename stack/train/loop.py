"""The step of training, and the loop around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stack.checkpoint.state import TrainState
from stack.data.batch import MicroBatch
from stack.dist.topology import Topology
from stack.errors import NonFiniteError
from stack.parallel.shard_batch import shard_batch
from stack.train.hooks import Hook
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


class Loader(Protocol):
    """What the loop needs of a loader."""

    def next_step(self) -> list[MicroBatch] | None: ...
    def state(self) -> dict[str, Any]: ...


def train_step(job: Job, state: TrainState) -> Step | None:
    """One window of data, one optimizer step; None at the end of the data. Collective."""
    watch = Stopwatch(job.topology.device)
    micro_batches = job.loader.next_step()
    if micro_batches is None:
        return None
    # Counted over all micro-batches and ranks before the first forward: the one denominator of loss and gradient.
    counts = count_step(job.method, micro_batches, job.topology, job.flops)
    step = Step(lr=job.lr_at(state.step), counts=counts)
    watch.lap("data_s")
    if counts.targets:
        loss_sum_local = forward_backward(job, micro_batches, counts.targets)
        step.loss = job.topology.sum(loss_sum_local) / counts.targets
        watch.lap("forward_backward_s")
        update_weights(job, step, loss_sum_local)
        watch.lap("optimizer_s")
    else:
        step.skipped = "no targets"
    step.times_s = watch.laps()
    advance(job, state, step)
    return step


def forward_backward(job: Job, micro_batches: Sequence[MicroBatch], num_targets: int) -> float:
    """Gradients of the step's mean loss; returns the sum of the token losses of this rank's slices."""
    topology = job.topology
    sums = []
    for batch in micro_batches:
        local = shard_batch(batch, topology.sp, topology.sp_rank)
        sums.append(job.engine.forward_backward(job.method, local, num_targets))
    return float(torch.stack(sums).double().sum())  # the one wait for the device before the update


def update_weights(job: Job, step: Step, loss_sum_local: float) -> None:
    """Clip and step. Where a loss or gradient is NaN or inf the engine leaves the weights alone; say where it was."""
    result = job.engine.step(step.lr)
    step.grad_norm, step.loss_scale = result.grad_norm, result.loss_scale
    step.clipped = result.clipped and not result.skipped
    assert step.loss is not None
    if not math.isfinite(step.loss):
        finite = job.topology.gather_objects(math.isfinite(loss_sum_local))
        ranks = [str(rank) for rank, good in enumerate(finite) if not good]
        step.skipped = f"nonfinite loss on rank {', '.join(ranks)}"
    elif result.skipped == "loss-scale":
        step.skipped = result.skipped
    elif result.skipped:
        step.skipped = "nonfinite gradient, summed over all ranks"


def advance(job: Job, state: TrainState, step: Step) -> None:
    """Count the step. Every window of data is a step, also a skipped one, so that the order of the data and the
    learning rate depend on the step number alone."""
    state.step += 1
    state.tokens += step.counts.tokens
    state.targets += step.counts.targets
    state.small_steps += step.counts.rows < job.rows_per_step
    state.empty_steps += step.skipped == "no targets"
    state.overflow_steps += step.skipped == "loss-scale"
    if step.skipped and step.skipped.startswith("nonfinite"):
        state.skipped_steps += 1
        state.nonfinite_in_row += 1
    elif not step.skipped:
        state.nonfinite_in_row = 0
    state.loader = job.loader.state()


def train(job: Job, state: TrainState, total_steps: int, meter: Meter, hooks: Sequence[Hook]) -> None:
    """Steps until `total_steps` or the end of the data. Raises NonFiniteError after too many bad steps in a row, once
    the hooks have seen the last of them."""
    while state.step < total_steps:
        step = train_step(job, state)
        if step is None:
            return
        record = meter.record(state, step)
        for hook in hooks:
            hook.after_step(state, record)
        if state.nonfinite_in_row > job.max_nonfinite_steps:
            raise NonFiniteError(
                f"step {state.step}: {step.skipped}; {state.nonfinite_in_row} such step(s) in a row, "
                f"engine.max_nonfinite_steps={job.max_nonfinite_steps}. The weights are those before the first of them. "
                "Fix: lower optim.lr, lengthen schedule.warmup_steps, or look at the data of these steps"
            )
