"""The lines of a calibration file: what was measured on a machine. `machine.with_calibration` reads them."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime


def calibration_line(
    constant: str,
    value: float,
    unit: str,
    measured: str,
    forecast: float | None,
    device: str,
    ranks: int,
) -> str:
    """One line. constant: of `machine.UNITS`, or another quantity, which is kept for people. measured: how. forecast: what
    was expected in its place, None where nothing was. ranks: of the run that measured it."""
    content = {
        "constant": constant,
        "value": value,
        "unit": unit,
        "measured": measured,
        "forecast": forecast,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "device": device,
        "ranks": ranks,
    }
    return json.dumps(content) + "\n"
