"""The `plan` section of the schema: what a training run does with its forecast. See `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class PlanConfig:
    """The forecast (`launch/plan.py`) at the start of a run."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """A run that the forecast says cannot fit its machine: `refuse` ends it before a device is touched, with the numbers
    and what would help; `warn` says the same and goes on; `off` asks no forecast. Only where the card is known."""

    calibration: str | None = None
    """File or run folder of what was measured on this machine, by an earlier run or by `launch/plan.py probe=true`; its
    numbers replace those of `site`. None: what `site` says."""
