"""From measurements to the numbers of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from stack.bench.calls import BACKWARD_UNITS
from stack.bench.fit import fit_bytes, fit_seconds
from stack.bench.measured import CallCount, Measured, Probe
from stack.bench.settings import BASELINE
from stack.models.flops import Flops, forward_flops
from stack.models.spec import ModelSpec


@dataclass(frozen=True)
class Spread:
    """Of the turns."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Rates:
    """What this machine does by itself on one rank, in the same run: medians over all contenders and turns."""

    gemm_flops_per_s: float
    attention_forward_s: float
    attention_backward_s: float


@dataclass(frozen=True)
class Row:
    """One contender at one length. Bytes are those of the rank that has most."""

    contender: str
    tokens: int
    step_s: Spread
    ratio: Spread | None
    """Step time over the baseline's, turn by turn; None without a baseline."""
    tokens_per_s: float
    mfu: float
    """Share of the step that the products which training needs would take by themselves, at `rates`."""
    hfu: float
    """The same for the products that were made."""
    products_s: float
    """Sum of the step's own matrix products and attention calls, each at its own time by itself."""
    over_products: float
    """Step time over `products_s`."""
    peak_bytes: int
    passes_peak_bytes: int
    """Until the end of backward."""
    states_bytes: int
    host_bytes: int
    rss_bytes: int
    traffic: dict[str, dict[str, float]]
    loss: float
    grad_norm: float
    rates: Rates


@dataclass(frozen=True)
class Growth:
    """How a contender's costs grow with the tokens of a row. Bytes: the peak of forward and backward on one rank."""

    contender: str
    fixed_bytes: float
    bytes_a_token: float
    bytes_from: int
    """Tokens from which on the bytes grow so; below, something of fixed size sets the peak."""
    seconds_a_token: float
    seconds_a_token_squared: float
    bytes_ratio: float | None
    """`bytes_a_token` over the baseline's."""


@dataclass(frozen=True)
class Work:
    """FLOPs of one rank's part of a step. Attention's backward is told by the FLOPs of the forward it belongs to."""

    gemm: float
    attention_forward: float
    attention_backward: float

    def seconds(self, rates: Rates, layer_flops: float) -> float:
        """layer_flops: forward FLOPs of the attention call that `rates` measured."""
        attention = (
            self.attention_forward * rates.attention_forward_s
            + self.attention_backward * rates.attention_backward_s
        )
        return self.gemm / rates.gemm_flops_per_s + attention / layer_flops


def needed(forward: Flops, ranks: int) -> Work:
    """What training needs, on one of `ranks` that share it: forward once, backward twice the products of forward."""
    gemm = 3.0 * (forward.total - forward.attention) / ranks
    return Work(gemm, forward.attention / ranks, forward.attention / ranks)


def executed(calls: Sequence[CallCount]) -> Work:
    """What a rank's recorded calls amount to."""
    sums = {"gemm": 0.0, "attention_forward": 0.0, "attention_backward": 0.0}
    for one in calls:
        sums[one.kind] += one.flops * one.number
    return Work(sums["gemm"], sums["attention_forward"], sums["attention_backward"] / BACKWARD_UNITS)


def rates_of(probes: Iterable[Probe]) -> Rates:
    probes = list(probes)
    return Rates(
        median(probe.gemm_flops_per_s for probe in probes),
        median(probe.attention_forward_s for probe in probes),
        median(probe.attention_backward_s for probe in probes),
    )


def rows_of(measured: Sequence[Measured], spec: ModelSpec, sp: int, rows: int) -> list[Row]:
    """The table, in the order of `measured`. spec: of the model that all contenders train; rows: of a micro-batch."""
    found = []
    for one in measured:
        same_length = [other for other in measured if other.tokens == one.tokens]
        rates = rates_of(probe for other in same_length for turn in other.probes for probe in turn)
        baseline = next((other for other in same_length if other.contender == BASELINE), None)
        found.append(_row(one, baseline, rates, spec, sp, rows))
    return found


def _row(one: Measured, baseline: Measured | None, rates: Rates, spec: ModelSpec, sp: int, rows: int) -> Row:
    ranks, step_s = len(one.inspections), Spread.of(one.seconds)
    documents = [one.tokens] * rows * (ranks // sp)
    layer_flops = rows * 4.0 * (spec.num_heads // sp) * spec.head_dim * one.tokens**2 / 2
    useful = needed(forward_flops(spec, documents), ranks)
    made = max((executed(calls) for calls in one.calls), key=lambda work: work.seconds(rates, layer_flops))
    products_s = median(_products_s(one, turn) for turn in one.probes)
    ratio = None
    if baseline is not None:
        ratio = Spread.of(own / other for own, other in zip(one.seconds, baseline.seconds, strict=True))
    return Row(
        contender=one.contender,
        tokens=one.tokens,
        step_s=step_s,
        ratio=ratio,
        tokens_per_s=sum(documents) / step_s.median,
        mfu=useful.seconds(rates, layer_flops) / step_s.median,
        hfu=made.seconds(rates, layer_flops) / step_s.median,
        products_s=products_s,
        over_products=step_s.median / products_s,
        peak_bytes=max(rank.peak_bytes for rank in one.inspections),
        passes_peak_bytes=max(rank.passes_peak_bytes for rank in one.inspections),
        states_bytes=max(rank.states_bytes for rank in one.inspections),
        host_bytes=max(rank.host_bytes for rank in one.inspections),
        rss_bytes=max(rank.rss_bytes for rank in one.inspections),
        traffic=one.inspections[0].traffic,
        loss=one.loss,
        grad_norm=one.grad_norm,
        rates=rates,
    )


def _products_s(one: Measured, turn: Sequence[Probe]) -> float:
    """Of the rank that takes longest."""
    return max(
        sum(call.number * seconds for call, seconds in zip(calls, probe.calls_s, strict=True))
        for calls, probe in zip(one.calls, turn, strict=True)
    )


def growth_of(rows: Sequence[Row]) -> list[Growth]:
    """The fits over all lengths; empty where there is one length only."""
    found: dict[str, Growth] = {}
    for name in dict.fromkeys(row.contender for row in rows):
        own = [row for row in rows if row.contender == name]
        tokens = [row.tokens for row in own]
        memory = fit_bytes(tokens, [row.passes_peak_bytes for row in own])
        seconds = fit_seconds(tokens, [row.step_s.median for row in own])
        if memory is not None and seconds is not None:
            found[name] = Growth(
                name, memory.fixed, memory.per_token, memory.first, *seconds, bytes_ratio=None
            )
    if BASELINE in found:
        per_token = found[BASELINE].bytes_a_token
        return [replace(fit, bytes_ratio=fit.bytes_a_token / per_token) for fit in found.values()]
    return list(found.values())
