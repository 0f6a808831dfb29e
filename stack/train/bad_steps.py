"""Steps that would spoil the run: NaN, inf and loss spikes, and what `faults` says to do about them.

A bad step never changes the weights. The policies differ in what comes next: the next step; the end; or going back to the
newest checkpoint, from where the steps are taken again and the data of the bad ones is read but not learned from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from stack.checkpoint.state import TrainState
from stack.config.schema_faults import FaultsConfig
from stack.errors import NonFiniteError, SpikeError, StackError
from stack.train.metrics import Step

KEPT = 64  # losses that the median is taken of
DOCUMENTS = 20  # lines about a bad step's documents, at most

SPIKE, NONFINITE, PASSED = "spike", "nonfinite", "passed over"
"""What `Step.skipped` begins with."""


@dataclass
class Verdict:
    """What is to happen behind a bad step. One of the two is set."""

    error: StackError | None = None
    """Ends the run."""

    passed_over: list[int] | None = None
    """Go back behind a checkpoint before these steps, and pass over their data."""


@dataclass
class BadSteps:
    """Judges steps. Every rank gives the same verdict, since it sees the same numbers."""

    faults: FaultsConfig
    max_nonfinite: int
    """`engine.max_nonfinite_steps`."""

    def spike(self, state: TrainState, loss: float) -> str | None:
        """What is wrong with a finite loss before its step is taken; None: nothing."""
        known, factor = state.recent_losses, self.faults.spike_factor
        if not factor or len(known) < self.faults.spike_min_steps or not math.isfinite(loss):
            return None
        usual = median(known)
        if loss <= factor * usual:
            return None
        return f"{SPIKE}: loss {loss:.4f}, above {factor:g} times the median {usual:.4f} of the last {len(known)}"

    def judge(self, state: TrainState, step: Step) -> Verdict | None:
        """The verdict on the step that was just counted; None: go on."""
        reason = step.skipped or ""
        if reason.startswith(SPIKE):
            return self._judge_spike(state, reason)
        if not reason.startswith(NONFINITE):
            return None
        policy, bad = self.faults.on_nonfinite, state.nonfinite_in_row
        if bad <= self.max_nonfinite and policy != "stop":
            return None
        if policy == "rollback":
            return Verdict(passed_over=list(range(state.step - bad + 1, state.step + 1)))
        limit = (
            "faults.on_nonfinite=stop"
            if policy == "stop"
            else f"engine.max_nonfinite_steps={self.max_nonfinite}"
        )
        text = (
            f"step {state.step}: {reason}; {bad} such step(s) in a row, {limit}. The weights are those before the first of "
            "them. Fix: lower optim.lr, lengthen schedule.warmup_steps, look at the data of these steps, or let the run go "
            "back by itself: faults=rollback"
        )
        return Verdict(error=NonFiniteError(text))

    def _judge_spike(self, state: TrainState, reason: str) -> Verdict | None:
        if self.faults.on_spike == "rollback":
            return Verdict(passed_over=[state.step])
        if self.faults.on_spike == "skip":
            return None
        text = (
            f"step {state.step}: {reason}; faults.on_spike=stop. The weights are those before this step. Fix: look at its "
            "data, lower optim.lr, or pass over it: faults.on_spike=skip or rollback"
        )
        return Verdict(error=SpikeError(text))


def remember_loss(state: TrainState, step: Step) -> None:
    """Keep the loss of a good step for the comparison with later ones."""
    if step.skipped is None and step.loss is not None:
        state.recent_losses = [*state.recent_losses, step.loss][-KEPT:]


def name_documents(
    state: TrainState, step: Step, describe: Callable[[], list[str]], tell: Callable[[str], None]
) -> None:
    """Tell which documents a bad step read, on all ranks; describe: gives a line for each."""
    if not (step.skipped or "").startswith((SPIKE, NONFINITE)):
        return
    documents = describe()
    for line in documents[:DOCUMENTS]:
        tell(f"step {state.step} read {line}")
    if len(documents) > DOCUMENTS:
        tell(f"step {state.step} read {len(documents) - DOCUMENTS} further pieces of documents")
