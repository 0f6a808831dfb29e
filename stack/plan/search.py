"""The longest row, the fewest GPUs, a curve over lengths: by planning again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stack.errors import ConfigError
from stack.plan.changes import Changes, as_overrides
from stack.plan.forecast import COMMUNICATION, OVERHEAD
from stack.plan.levers import Run
from stack.plan.verdict import NO, Verdict

MOST_TOKENS = 1 << 28
STEP = 1024
"""Tokens a rank: lengths are looked for in steps of it times parallel.sp, or of 1 % if that is more."""

MOST_GPUS = 1024


@dataclass(frozen=True)
class Point:
    """One plan of a search. label: what was varied, as overrides."""

    changes: Changes
    found: Verdict

    @property
    def label(self) -> str:
        return as_overrides(self.changes)

    @property
    def seq_len(self) -> int:
        return int(self.found.forecast.run["seq_len"])

    @property
    def fits(self) -> bool:
        """It is not known to be too much: a size beyond what has been proven is searched all the same."""
        return self.found.answer != NO

    def parts(self) -> dict[str, int]:
        """Bytes of the card's need by category; the last is the margin."""
        memory = self.found.forecast.memory
        parts = dict(memory.peak.parts)
        parts[COMMUNICATION] = memory.communication_bytes
        parts[OVERHEAD] = memory.overhead_bytes
        parts["margin"] = max(0, self.found.need_bytes - sum(parts.values()))
        return {name: size for name, size in parts.items() if size}


def sweep_lengths(run: Run, lengths: Sequence[int]) -> list[Point]:
    return [_point(run, (("data.seq_len", length),)) for length in lengths]


def longest(run: Run) -> list[Point]:
    """Plans at lengths around the longest that fits, ascending; the last that fits is the answer. One point that does not
    fit if even the shortest is too much. A length that a start would refuse, as beyond a model's positions, counts as one
    that does not fit, without a point. Raises ConfigError if that is the shortest."""
    step = STEP * run.cfg.parallel.sp
    low, high = 0, step
    points: dict[int, Point] = {}

    def fits(length: int) -> bool:
        try:
            points[length] = _point(run, (("data.seq_len", length),))
        except ConfigError:
            if length == step:
                raise
            return False
        return points[length].fits

    while high <= MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    while low and high <= MOST_TOKENS and high - low > max(step, low // 100):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return [points[length] for length in sorted(points)]


def what_ends(run: Run, points: Sequence[Point]) -> str:
    """Why `longest` found no longer row, in words. points: its own."""
    beyond = [point for point in points if not point.fits]
    if beyond:
        return "; ".join(beyond[0].found.reasons)
    last = points[-1].seq_len
    try:
        _point(run, (("data.seq_len", last + max(STEP * run.cfg.parallel.sp, last // 100)),))
    except ConfigError as error:
        return "; ".join(f"{fault.key}: expected {fault.want}" for fault in error.faults)
    return "none was looked for"


def fewest_gpus(run: Run) -> list[Point]:
    """Plans with ever more GPUs, up to the first that fits; each with the largest sp that its heads allow."""
    site = run.machine.site
    most = min(MOST_GPUS, (site.nodes or MOST_GPUS) * (site.gpus_a_node or 1))
    points: list[Point] = []
    gpus = 1
    while gpus <= most:
        best: Point | None = None
        for sp in _degrees(gpus):
            try:
                best = _point(run, (("gpus", gpus), ("parallel.sp", sp)))
            except ConfigError:
                continue  # the heads do not divide
            break
        if best is not None:
            points.append(best)
            if best.fits:
                return points
        gpus *= 2
    return points


def _degrees(gpus: int) -> list[int]:
    return [gpus // part for part in range(1, gpus + 1) if gpus % part == 0]


def _point(run: Run, changes: Changes) -> Point:
    return Point(changes, run.plan(changes))
