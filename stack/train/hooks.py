"""What happens beside the steps: evaluation and checkpoints. Hooks watch and save; they never change weights, loss or data.

Hooks are called in the order of the list, on every rank, after each step. A record is the flat dict of
`metrics.Meter.record`; evaluation adds its numbers to it, and everything that shows or keeps numbers comes behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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


class EvaluationHook:
    """Adds `eval_loss`, `eval_perplexity` and `eval_targets` to the record every `every` steps and at the last step."""

    def __init__(self, evaluate: Callable[[], Record], every: int, total_steps: int):
        self._evaluate, self._every, self._total_steps = evaluate, every, total_steps

    def after_step(self, state: TrainState, record: Record) -> None:
        due = self._every > 0 and state.step % self._every == 0
        if due or state.step == self._total_steps:
            record.update(plain(self._evaluate()))

    def close(self) -> None:
        pass


class CheckpointHook:
    """Saves every `every` steps, and at the last step if `final`. Stands last, so that what the other hooks keep of a
    step is kept before the step counts as saved."""

    def __init__(self, save: Callable[[TrainState], Path], every: int, final: bool, total_steps: int):
        self._save, self._every, self._final, self._total_steps = save, every, final, total_steps

    def after_step(self, state: TrainState, record: Record) -> None:
        due = self._every > 0 and state.step % self._every == 0
        if due or (self._final and state.step == self._total_steps):
            self._save(state)

    def close(self) -> None:
        pass
