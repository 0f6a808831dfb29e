"""The machine of a forecast: a site's numbers in bytes, seconds and FLOPS, each with where it comes from.

Without a calibration file all are assumed, from the data sheets and measurements that the site's YAML names. What
`launch/plan.py probe=true` or a training run measured on the machine replaces them: a file of JSON lines, of which the last
for a constant counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stack.config.schema import SiteConfig
from stack.errors import ConfigError, Fault
from stack.plan.forecast import Constant

GB, TB = 1e9, 1e12

UNITS = {
    "peak_tflops": "TFLOPS",
    "memory_gib": "GiB",
    "memory_tb_s": "TB/s",
    "host_memory_gib": "GiB a node",
    "host_memory_gb_s": "GB/s a node",
    "link_gb_s": "GB/s",
    "network_gb_s": "GB/s",
    "host_link_gb_s": "GB/s",
    "disk_gb_s": "GB/s",
    "gemm_share": "of the peak",
    "attention_share": "of the peak",
    "attention3_share": "of the peak",
    "memory_share": "of the peak rate",
    "context_gib": "GiB",
    "communicator_gib": "GiB",
    "exchange_gib": "GiB a peer",
    "reserve_share": "of live bytes",
}
"""The constants of a site, which a calibration may replace."""

TIMED = ("peak_tflops", "memory_tb_s", "host_link_gb_s")
"""Without these there is no step time; with several ranks without a link either."""


@dataclass(frozen=True)
class Machine:
    """site: with what was measured put in. sources: of each constant."""

    site: SiteConfig
    sources: Mapping[str, str]

    def missing(self, world: int) -> list[str]:
        """Constants that nobody gave, without which there is no step time of so many ranks."""
        names: list[str] = list(TIMED)
        if world > 1:
            names.append("link_gb_s" if world <= (self.site.gpus_a_node or world) else "network_gb_s")
        return [f"site.{name}" for name in names if getattr(self.site, name) is None]

    @property
    def calibrated(self) -> bool:
        """Whether memory overheads were measured on the machine."""
        return any(name in self.sources for name in ("context_gib", "reserve_share")) and all(
            self.sources[name].startswith("measured") for name in ("context_gib", "reserve_share")
        )

    def constants(self) -> dict[str, Constant]:
        """Those that are known, for the report."""
        found = {}
        for name, unit in UNITS.items():
            value = getattr(self.site, name)
            if value is not None:
                found[name] = Constant(value, unit, self.sources[name])
        return found

    def rate(self, name: str) -> float:
        """In bytes or FLOPs a second."""
        value = getattr(self.site, name)
        assert value is not None, name
        scale = TB if name in ("peak_tflops", "memory_tb_s") else GB
        return value * scale


def read_machine(site: SiteConfig, calibration: str | Path | None = None) -> Machine:
    """Raises ConfigError for a calibration file that cannot be read."""
    assumed = f"assumed (conf/site/{site.name}.yaml)"
    machine = Machine(site, dict.fromkeys(UNITS, assumed))
    return with_calibration(machine, calibration) if calibration is not None else machine


def with_calibration(machine: Machine, path: str | Path) -> Machine:
    """The constants of the file in place of the assumed ones. Lines of other quantities (peaks, step times) are skipped."""
    file = Path(path).expanduser()
    file = file / "calibration.jsonl" if file.is_dir() else file
    measured: dict[str, float] = {}
    sources = dict(machine.sources)
    for number, text in enumerate(_lines(file), start=1):
        record = _record(file, number, text)
        name, value = record.get("constant"), record.get("value")
        if name in UNITS and isinstance(value, int | float) and value >= 0:
            measured[name] = float(value)
            what = record.get("measured") or record.get("device") or ""
            sources[name] = f"measured here ({file}{f', {what}' if what else ''})"
    known = {item.name for item in fields(SiteConfig)}
    assert measured.keys() <= known
    return Machine(replace(machine.site, **measured), sources)


def _lines(file: Path) -> list[str]:
    try:
        return [text for text in file.read_text(encoding="utf-8").splitlines() if text.strip()]
    except (OSError, UnicodeDecodeError) as error:
        want = f"a calibration file, or the run folder that holds one ({error})"
        fix = "the run folder of a training, or what launch/plan.py probe=true wrote"
        raise ConfigError([Fault("calibration", str(file), want, fix)]) from error


def _record(file: Path, number: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as error:
        record = None
        reason = str(error)
    else:
        reason = "not an object"
    if isinstance(record, dict):
        return record
    want = f"a JSON object a line (line {number}: {reason})"
    raise ConfigError([Fault("calibration", str(file), want, "remove the line")])
