"""The `faults` section of the schema: what a run does when something goes wrong with it. See `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class FaultsConfig:
    """Hung ranks, and steps that would spoil the run."""

    watchdog_s: float = 900.0
    """Seconds that a step may take, or 10 times the median of the steps so far if that is more; 4 times as much
    for the first step, which may compile, and for start, evaluation and save, or 10 times the longest of its
    kind so far. Beyond it the stacks of all ranks go to `stacks/` in the run folder and the job ends. 0: off."""

    on_nonfinite: Literal["skip", "stop", "rollback"] = "skip"
    """On a NaN or inf loss or gradient: `skip` leaves the weights alone and goes on, up to
    `engine.max_nonfinite_steps` in a row, then stops; `stop` ends at the first; `rollback` skips as many, then
    goes back to the newest checkpoint and passes over the data of these steps."""

    spike_factor: float = 0.0
    """A finite loss above this many times the median of the last 64 is a spike; 2 is a strict choice. 0: off."""

    spike_min_steps: int = 16
    """Losses that the median needs before it is asked."""

    on_spike: Literal["skip", "stop", "rollback"] = "skip"
    """On a spike: `skip` drops the step's update, `stop` ends the run with the weights before it, `rollback`
    goes back to the newest checkpoint and passes over the step's data."""

    max_rollbacks: int = 3
    """Times that a run may go back before it stops instead. Counted over restarts as well, as far as the checkpoints tell:
    a run that is killed before it saved again does not remember that it went back."""
