"""Memory against length by component, with the card's line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stack.plan.forecast import GIB
from stack.plan.search import Point

SIZE = (9.0, 5.5)


def draw(points: Sequence[Point], title: str, file: Path) -> None:
    """Stacked areas over the varied number, a bar where it is one point; the folder of `file` is made."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    parts = [point.parts() for point in points]
    names = list(dict.fromkeys(name for part in parts for name in part))
    heights = [[part.get(name, 0) / GIB for part in parts] for name in names]
    by_length = len({point.seq_len for point in points}) == len(points) > 1
    if by_length:
        axes.stackplot([point.seq_len for point in points], heights, labels=names)
        axes.set_xlabel("tokens of a row (data.seq_len)")
    else:
        bottom = [0.0] * len(points)
        labels = [str(point.found.forecast.run["ranks"]) for point in points]
        for name, row in zip(names, heights, strict=True):
            axes.bar(labels, row, bottom=bottom, label=name)
            bottom = [low + high for low, high in zip(bottom, row, strict=True)]
        axes.set_xlabel("GPUs")
    card = points[0].found.card_bytes
    if card:
        axes.axhline(card / GIB, color="black", linestyle="--", label=f"the card, {card / GIB:.1f} GiB")
    axes.set_ylabel("GiB a GPU at the peak")
    axes.set_title(title)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
