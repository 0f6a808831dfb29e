"""The numbers on the console and in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from stack.bench.settings import BASELINE
from stack.bench.summary import Growth, Row

matplotlib.use("Agg")
from matplotlib import pyplot

MIB = 1024**2
NOTES = """\
ratio: step time over the baseline's, turn by turn. MFU: what training needs, HFU: what was made, at this machine's own rates,
as shares of the step. step/products: step over its own matrix products and attention calls, each at its own speed. Peak:
bytes alive on the device at most; passes: at most until the end of backward; states: between steps; host: what offload keeps
besides. Bytes and RSS are those of one rank; growth is that of passes."""


def tables(rows: Sequence[Row], fits: Sequence[Growth]) -> str:
    """Steps, communication, growth."""
    parts = [_grid(STEP_TITLES, [_step_cells(row) for row in rows]), NOTES]
    parts += [_grid(RATE_TITLES, [_rate_cells(row) for row in {row.tokens: row for row in rows}.values()])]
    parts += [_grid(TRAFFIC_TITLES, [cells for row in rows for cells in _traffic_cells(row)])]
    if fits:
        parts += [_grid(GROWTH_TITLES, [_growth_cells(fit) for fit in fits])]
    if any(row.ratio for row in rows):
        parts += ["\n".join(_against_baseline(rows, fits))]
    return "\n\n".join(parts)


STEP_TITLES = (
    "tokens",
    "contender",
    "step s",
    "least",
    "most",
    "ratio",
    "tokens/s",
    "MFU",
    "HFU",
    "step/products",
    "peak MiB",
    "passes",
    "states",
    "host",
    "RSS",
)


def _step_cells(row: Row) -> list[str]:
    parts = (row.peak_bytes, row.passes_peak_bytes, row.states_bytes, row.host_bytes)
    bytes_cells = [f"{part / MIB:.1f}" for part in parts]
    return [
        f"{row.tokens:,}",
        row.contender,
        *(f"{part:.3f}" for part in (row.step_s.median, row.step_s.least, row.step_s.most)),
        "" if row.ratio is None else f"{row.ratio.median:.3f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.mfu:.1%}",
        f"{row.hfu:.1%}",
        f"{row.over_products:.2f}",
        *bytes_cells,
        f"{row.rss_bytes / MIB:.0f}",
    ]


RATE_TITLES = ("tokens", "GEMM GFLOP/s a rank", "attention forward s a layer", "backward s")


def _rate_cells(row: Row) -> list[str]:
    rates = row.rates
    times = (rates.attention_forward_s, rates.attention_backward_s)
    return [
        f"{row.tokens:,}",
        f"{rates.gemm_flops_per_s / 1e9:.1f}",
        *(f"{seconds:.4f}" for seconds in times),
    ]


TRAFFIC_TITLES = ("tokens", "contender", "communication", "calls", "MiB", "s, nothing hidden")


def _traffic_cells(row: Row) -> list[list[str]]:
    return [
        [
            f"{row.tokens:,}",
            row.contender,
            kind,
            f"{found['calls']:.0f}",
            f"{found['num_bytes'] / MIB:.2f}",
            f"{found['seconds']:.3f}",
        ]
        for kind, found in sorted(row.traffic.items())
    ]


GROWTH_TITLES = (
    "contender",
    "fixed MiB",
    "bytes a token",
    "from tokens",
    "ratio",
    "us a token",
    "ns a token^2",
)


def _growth_cells(fit: Growth) -> list[str]:
    return [
        fit.contender,
        f"{fit.fixed_bytes / MIB:.1f}",
        f"{fit.bytes_a_token:,.0f}",
        f"{fit.bytes_from:,}",
        "" if fit.bytes_ratio is None else f"{fit.bytes_ratio:.3f}",
        f"{fit.seconds_a_token * 1e6:.2f}",
        f"{fit.seconds_a_token_squared * 1e9:.4f}",
    ]


def _against_baseline(rows: Sequence[Row], fits: Sequence[Growth]) -> list[str]:
    """One line a contender."""
    lines = []
    for name in dict.fromkeys(row.contender for row in rows if row.contender != BASELINE):
        own = [(row.tokens, row.ratio.median) for row in rows if row.contender == name and row.ratio]
        text = f"{name} over {BASELINE}: step " + ", ".join(
            f"{ratio:.3f} at {tokens:,}" for tokens, ratio in own
        )
        growth = [fit.bytes_ratio for fit in fits if fit.contender == name]
        lines.append(
            text + "".join(f"; peak bytes a token {ratio:.3f}" for ratio in growth if ratio is not None)
        )
    return lines


def _grid(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Columns in line; words to the left, numbers to the right."""
    lines = [titles, *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles))]
    words = {place for place, title in enumerate(titles) if title in ("contender", "communication")}
    return "\n".join(
        "  ".join(
            text.ljust(width) if place in words else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def draw(rows: Sequence[Row], fits: Sequence[Growth], path: Path) -> None:
    """Step time, ratio, peak bytes and MFU against length; lines between points are the fits."""
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    names = list(dict.fromkeys(row.contender for row in rows))
    for name in names:
        own = [row for row in rows if row.contender == name]
        tokens = [row.tokens for row in own]
        fit = next((fit for fit in fits if fit.contender == name), None)
        _points(axes[0, 0], name, tokens, [row.step_s.median for row in own], _seconds(fit))
        _points(axes[0, 1], name, tokens, [row.ratio.median if row.ratio else float("nan") for row in own])
        _points(axes[1, 0], name, tokens, [row.passes_peak_bytes / MIB for row in own], _mebibytes(fit))
        _points(axes[1, 1], name, tokens, [row.mfu for row in own])
    tops = [None, None, 1.1 * max(row.passes_peak_bytes for row in rows) / MIB, 1.05]
    labels = [
        "step, s",
        "step over the baseline's",
        "peak until backward's end, MiB a rank",
        "MFU at this machine's own rates",
    ]
    for place, label, top in zip(axes.flat, labels, tops, strict=True):
        place.set(xlabel="tokens of a row", ylabel=label, xscale="log")
        lengths = sorted({row.tokens for row in rows})
        place.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        place.minorticks_off()
        place.grid(alpha=0.3)
        if place is not axes[0, 0]:
            place.set_ylim(0, top)
    axes[0, 0].set_yscale("log")
    axes[0, 0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _points(axis, name: str, tokens: list[int], values: list[float], curve=None) -> None:
    (drawn,) = axis.plot(tokens, values, "o" if curve else "o-", label=name)
    if curve:
        between = np.geomspace(min(tokens), max(tokens), 50)
        axis.plot(between, curve(between), "-", color=drawn.get_color(), linewidth=1)


def _seconds(fit: Growth | None):
    return fit and (lambda tokens: fit.seconds_a_token * tokens + fit.seconds_a_token_squared * tokens**2)


def _mebibytes(fit: Growth | None):
    def curve(tokens: np.ndarray) -> np.ndarray:
        assert fit is not None
        line = (fit.fixed_bytes + fit.bytes_a_token * tokens) / MIB
        return np.where(tokens >= fit.bytes_from, line, np.nan)

    return fit and curve
