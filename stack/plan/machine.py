"""The machine of a forecast: a site's numbers in bytes, seconds and FLOPS, each with where it comes from.

Without a calibration file all are assumed, from the data sheets and measurements that the site's YAML names. What
`launch/plan.py probe=true` or a training run measured on the machine replaces them: a file of JSON lines, of which the last
for a constant counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stack.config.schema import SiteConfig
from stack.errors import ConfigError, Fault
from stack.plan.changes import by_preset
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

OVERHEADS = ("context_gib", "reserve_share")
"""What of the card is not the run's tensors. Both measured, no margin is needed for what nobody knew."""

MAY_BE_0 = ("context_gib", "communicator_gib", "exchange_gib", "reserve_share")
"""What libraries take beside the tensors. The others divide something, or are memory that has to be there."""

TIMED = ("peak_tflops", "memory_tb_s", "host_link_gb_s")
"""Without these there is no step time; with several ranks without a link either."""


@dataclass(frozen=True)
class Machine:
    """site: with what was measured put in. sources: of each constant. remarks: what its measurements have to be taken for."""

    site: SiteConfig
    sources: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    measured_ranks: int = 0
    """Of the largest run that measured what libraries and the allocator take of the card; 0: none did."""

    def missing(self, world: int) -> list[str]:
        """Constants that nobody gave, without which there is no step time of so many ranks."""
        names: list[str] = list(TIMED)
        if world > 1:
            names.append("link_gb_s" if world <= (self.site.gpus_a_node or world) else "network_gb_s")
        return [f"site.{name}" for name in names if getattr(self.site, name) is None]

    def calibrated(self, ranks: int) -> bool:
        """Whether memory overheads were measured on the machine by a run of at least so many ranks."""
        return 0 < ranks <= self.measured_ranks

    @property
    def rates_measured(self) -> bool:
        """Whether products and attention were timed on the machine."""
        return all(
            self.sources.get(name, "").startswith("measured") for name in ("gemm_share", "attention_share")
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
    """Raises ConfigError for a calibration file that cannot be read, or is of another kind of device."""
    machine = Machine(site, _sources(site))
    return with_calibration(machine, calibration) if calibration is not None else machine


def _sources(site: SiteConfig) -> dict[str, str]:
    """By constant. What the command line or an experiment put over the site's file is not said to be from there."""
    name = f"conf/site/{site.name}.yaml"
    by_file, there = by_preset("site", site)
    assumed = f"assumed ({name if there else 'defaults of stack/config/schema_site.py'})"
    given = f"given (over {name})" if there else f"given (site={site.name})"
    return {key: assumed if getattr(site, key) == getattr(by_file, key) else given for key in UNITS}


def with_calibration(machine: Machine, path: str | Path) -> Machine:
    """The constants of the file in place of the assumed ones. Lines of other quantities (peaks, step times) are skipped."""
    file = Path(path).expanduser()
    file = file / "calibration.jsonl" if file.is_dir() else file
    measured: dict[str, float] = {}
    sources, devices = dict(machine.sources), dict[str, None]()
    ranks = dict.fromkeys(OVERHEADS, 0)
    for number, text in _lines(file):
        record = _record(file, number, text)
        name = record.get("constant")
        if isinstance(name, str) and name in UNITS:
            measured[name] = _value(file, number, name, record.get("value"))
            device, what = str(record.get("device") or ""), record.get("measured")
            _judge_device(machine.site, file, number, device)
            devices[device] = None
            if name in ranks:
                ranks[name] = _ranks(file, number, record.get("ranks", 1.0))
            sources[name] = f"measured here ({', '.join(str(one) for one in (file, what, device) if one)})"
    known = {item.name for item in fields(SiteConfig)}
    assert measured.keys() <= known
    remarks = [f"{file} has no constant of a machine: nothing of it is used"] if not measured else []
    card = (machine.site.card or "").lower().split()[:1]
    others = [one for one in devices if one and card and card[0] not in one.lower()]
    remarks += [f"what was measured on {one} ({file}) holds for {machine.site.card}" for one in others]
    reach = min(ranks.values())
    if reach:
        remarks.append(f"memory beside the tensors as measured ({file}) for runs of at most {reach} ranks")
    return Machine(replace(machine.site, **measured), sources, tuple(remarks), reach)


def _ranks(file: Path, number: int, given: Any) -> int:
    if isinstance(given, float) and math.isfinite(given) and given >= 1 and given == int(given):
        return int(given)
    raise _damaged(file, number, "ranks of 1 or more", repr(given))


def _value(file: Path, number: int, name: str, value: Any) -> float:
    if isinstance(value, float) and math.isfinite(value) and (value > 0 or (value == 0 and name in MAY_BE_0)):
        return value
    least = "of 0 or more" if name in MAY_BE_0 else "above 0"
    raise _damaged(file, number, f"a number {least} for {name}", repr(value))


def _damaged(file: Path, number: int, want: str, found: str) -> ConfigError:
    return ConfigError(
        [Fault("calibration", str(file), f"{want} (line {number}: {found})", "remove the line")]
    )


def _judge_device(site: SiteConfig, file: Path, number: int, device: str) -> None:
    """A CPU's rates say nothing of a GPU, nor a GPU's of a CPU."""
    if device and site.device != "auto" and (device == "cpu") != (site.device == "cpu"):
        want = f"what was measured on site={site.name}, a {site.device} (line {number}: {device})"
        fix = "the file of another run, or the site that it was measured on"
        raise ConfigError([Fault("calibration", str(file), want, fix)])


def _lines(file: Path) -> list[tuple[int, str]]:
    """With their numbers, from 1."""
    try:
        lines = enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        return [(number, text) for number, text in lines if text.strip()]
    except (OSError, UnicodeDecodeError) as error:
        want = f"a calibration file, or the run folder that holds one ({error})"
        fix = "the run folder of a training, or what launch/plan.py probe=true wrote"
        raise ConfigError([Fault("calibration", str(file), want, fix)]) from error


def _record(file: Path, number: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text, parse_int=float)
    except ValueError as error:
        record = None
        reason = str(error)
    else:
        reason = "not an object"
    if isinstance(record, dict):
        return record
    raise _damaged(file, number, "a JSON object a line", reason)
