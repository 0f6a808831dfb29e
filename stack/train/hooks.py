"""What happens beside the steps: evaluation and checkpoints. Hooks watch and save; they never change weights, loss or data.

Hooks are called in the order of the list, on every rank, after each step. A record is the flat dict of
`metrics.Meter.record`; evaluation adds its numbers to it, and everything that shows or keeps numbers comes behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from stack.checkpoint.state import TrainState
from stack.train.metrics import plain

Record = dict[str, Any]


class Hook(Protocol):
    """Something that watches the run."""

    def after_step(self, state: TrainState, record: Record) -> None:
        """Called on every rank after each step, skipped ones too."""
        ...

    def close(self) -> None:
        """Called once, after the last step; not if the run ends with an error."""
        ...


class EvaluationCut(Exception):
    """The run is to stop, and this evaluation was dropped for it."""


class EvaluationHook:
    """Adds `eval_loss`, `eval_perplexity` and `eval_targets` to the record every `every` steps and at the last step.

    Raises EvaluationCut where `evaluate` returns None.
    """

    def __init__(self, evaluate: Callable[[], Record | None], every: int, total_steps: int):
        self._evaluate, self._every, self._total_steps = evaluate, every, total_steps

    def after_step(self, state: TrainState, record: Record) -> None:
        due = self._every > 0 and state.step % self._every == 0
        if due or state.step == self._total_steps:
            numbers = self._evaluate()
            if numbers is None:
                raise EvaluationCut
            record.update(plain(numbers))

    def close(self) -> None:
        pass


class StallHook:
    """Adds `checkpoint_stall_s` to the record: the seconds since the last record that the steps waited for checkpoints.
    Stands first, for the hooks that keep and show numbers."""

    def __init__(self, take_stall_s: Callable[[], float]):
        self._take_stall_s = take_stall_s

    def after_step(self, state: TrainState, record: Record) -> None:
        record["checkpoint_stall_s"] = self._take_stall_s()

    def close(self) -> None:
        pass


class Saves(Protocol):
    """What the hook needs of `stack.checkpoint.save.Saver`."""

    def save(self, engine: Any, state: TrainState, metrics: dict[str, float]) -> None: ...
    def poll(self) -> None: ...
    def close(self) -> None: ...


class CheckpointHook:
    """Saves every `every` steps, and at the last step if `final`. Stands last, so that what the other hooks keep of a
    step is kept before the step counts as saved. Closing it waits for the last save, and raises if that failed.

    going_back: the run may go back behind nonfinite steps. Between them nothing is saved then: the weights are the same, and
    the checkpoints before them must not be deleted for it.
    """

    def __init__(
        self,
        saver: Saves,
        engine: Any,
        every: int,
        final: bool,
        total_steps: int,
        going_back: bool = False,
    ):
        self._saver, self._engine, self._going_back = saver, engine, going_back
        self._every, self._final, self._total_steps = every, final, total_steps

    def after_step(self, state: TrainState, record: Record) -> None:
        self._saver.poll()
        between_bad = self._going_back and state.nonfinite_in_row > 0
        due = self._every > 0 and state.step % self._every == 0 and not between_bad
        if due or (self._final and state.step == self._total_steps):
            self.save(state, record)

    def save(self, state: TrainState, record: Record) -> None:
        """Save this step, with the metrics in its record, if the run saves at all."""
        if self._every > 0 or self._final:
            names = ("loss", "eval_loss", "eval_perplexity")
            metrics = {name: record[name] for name in names if record.get(name) is not None}
            self._saver.save(self._engine, state, metrics)

    def close(self) -> None:
        self._saver.close()
