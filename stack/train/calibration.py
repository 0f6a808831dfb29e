"""The forecast beside the measurement, once a run's steps are warm; what differs goes to `calibration.jsonl` of the run
folder, which `launch/plan.py calibration=FOLDER` reads.

On a GPU the allocator says what was live and what it holds. On CPU ranks nobody does, so there only the step time and the
growth of resident memory are shown.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from stack.checkpoint.state import TrainState
from stack.dist.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from stack.dist.topology import Topology
from stack.plan.calibration import calibration_line
from stack.plan.forecast import GIB
from stack.train.forecast import Outlook

APART = 0.05
"""Share by which a measurement may differ from its forecast without a word."""

WARM_STEPS = 3
"""Steps that are measured, behind the first one, which allocates and compiles."""


@dataclass(frozen=True)
class Measured:
    """One quantity. constant: its name in a calibration file; forecast: 0 where there is none to compare with."""

    constant: str
    words: str
    value: float
    forecast: float
    unit: str
    measured: str
    judged: bool = True
    """Whether a difference is a fault of the forecast."""

    @property
    def apart(self) -> float:
        return self.value / self.forecast - 1 if self.forecast else 0.0

    def describe(self) -> str:
        told = f"{self.words} {self.value:.4g} {self.unit}"
        if not self.forecast:
            return told
        return f"{told}, forecast {self.forecast:.4g} ({self.apart:+.1%})"


def calibration_hooks(
    outlook: Outlook, file: Path, topology: Topology, tell: Callable[[str], None]
) -> list[CalibrationHook]:
    """On rank 0, where a forecast was asked for."""
    wanted = topology.is_main and outlook != Outlook()
    return [CalibrationHook(outlook, file, topology.device, tell, topology.world)] if wanted else []


class CalibrationHook:
    """Compares once, behind the first step and `WARM_STEPS` more that trained. Rank 0 only.

    Peak memory of a GPU is that since the start of the process, so it stands beside the highest of all phases.
    """

    def __init__(
        self, outlook: Outlook, file: Path, device: torch.device, tell: Callable[[str], None], ranks: int
    ):
        self._outlook, self._file, self._device, self._tell = outlook, file, device, tell
        self._ranks = ranks
        self._steps: list[dict[str, Any]] = []
        self._trained, self._resident = 0, 0
        self._growth: int | None = None

    def after_step(self, state: TrainState, record: dict[str, Any]) -> None:
        if self._trained > WARM_STEPS or record["skipped"]:
            return
        self._trained += 1
        if self._device.type == "cpu":
            self._watch_resident()
        if self._trained > 1:
            self._steps.append(record)
        if self._trained > WARM_STEPS:
            try:
                self._compare()
            except Exception:  # noqa: BLE001  a comparison is not worth a run
                self._tell(f"warning: no comparison with the forecast:\n{traceback.format_exc().rstrip()}")

    def _watch_resident(self) -> None:
        """Of the first warm step, from the end of the one before."""
        if self._trained == 1 and reset_peak_resident():
            self._resident = resident_bytes()
        elif self._trained == 2 and self._resident:
            self._growth = peak_resident_bytes() - self._resident

    def _compare(self) -> None:
        found = self._measure()
        self._tell("measured: " + "; ".join(one.describe() for one in found))
        apart = [one for one in found if one.judged and abs(one.apart) > APART]
        if apart:
            told = "; ".join(one.describe() for one in apart)
            self._tell(
                f"warning: more than {APART:.0%} from the forecast: {told}. Written to {self._file}, for "
                f"launch/plan.py calibration={self._file.parent}"
            )
            self._write(found)

    def _measure(self) -> list[Measured]:
        verdict = self._outlook.found
        forecast = verdict.forecast if verdict is not None else None
        seconds = median(record["step_s"] for record in self._steps)
        over = f"median of {WARM_STEPS} warm steps"
        expected = forecast.time.seconds if forecast is not None else 0.0
        found = [Measured("step_s", "a step", seconds, expected, "s", over)]
        if self._device.type == "cuda":
            found += self._of_device()
        elif self._growth is not None:
            grown = (
                forecast.memory.peak.num_bytes - forecast.memory.states_bytes if forecast is not None else 0
            )
            note = "resident memory grew in a warm step, where malloc may use what it kept, by"
            growth = self._growth / GIB
            found.append(
                Measured("resident_growth_gib", note, growth, grown / GIB, "GiB", "first warm step", False)
            )
        return found

    def _of_device(self) -> list[Measured]:
        """Bytes of the card; untested where there is none."""
        allocated = torch.cuda.max_memory_allocated(self._device) / GIB
        reserved = torch.cuda.max_memory_reserved(self._device) / GIB
        free, total = torch.cuda.mem_get_info(self._device)
        outside = (total - free) / GIB - torch.cuda.memory_reserved(self._device) / GIB
        machine, verdict = self._outlook.machine, self._outlook.found
        peak = share = context = communication = 0.0
        if machine is not None and verdict is not None:
            memory = verdict.forecast.memory
            peak, communication = memory.peak.num_bytes / GIB, memory.communication_bytes / GIB
            share, context = machine.site.reserve_share, machine.site.context_gib
        since = "since the start of the process"
        beside = f"outside torch's allocator, less {communication:.2f} GiB assumed of NCCL"
        return [
            Measured("peak_allocated_gib", "live tensors at most", allocated, peak, "GiB", since),
            Measured("peak_reserved_gib", "reserved at most", reserved, peak * (1 + share), "GiB", since),
            Measured(
                "reserve_share",
                "reserved beyond live",
                reserved / allocated - 1,
                share,
                "of live bytes",
                since,
                False,
            ),
            Measured(
                "context_gib",
                "CUDA and the rest",
                max(0.0, outside - communication),
                context,
                "GiB",
                beside,
                False,
            ),
        ]

    def _write(self, found: list[Measured]) -> None:
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        lines = [
            calibration_line(
                one.constant,
                one.value,
                one.unit,
                one.measured,
                one.forecast or None,
                device,
                self._ranks,
            )
            for one in found
        ]
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            self._tell(f"warning: {self._file} cannot be written: {error}")

    def close(self) -> None:
        pass
