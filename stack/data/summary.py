"""What a store holds, for people: in words, and its documents' lengths as a picture."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from stack.data.store import TokenStore


def describe(store: TokenStore) -> str:
    """What a store holds and what was left out."""
    info = store.info
    lines = [f"token store {store.folder}: {info.num_documents:,} documents, {info.num_tokens:,} tokens"]
    if info.text_bytes:
        tokens = info.num_tokens - (info.num_documents if info.eos_id is not None and not info.masked else 0)
        lines[0] += f", {info.text_bytes:,} bytes of text, {info.text_bytes / tokens:.2f} bytes a token"
        lines.append(
            f"  end-of-text token: {'none' if info.eos_id is None else info.eos_id}; "
            f"tokenizer: {store.trained_tokenizer or 'the one that model.tokenizer or model.path names'}"
        )
    lines.append(f"  documents by length: {_lengths_in_words(info.lengths)}")
    lines += [f"  {note}" for note in info.notes]
    for reason, entry in info.dropped.items():
        lines.append(
            f"  left out, {reason}: {entry['count']:,} ({entry['num_bytes']:,} bytes), first {entry['first']}"
        )
    return "\n".join(lines)


def draw_lengths(store: TokenStore, path: Path) -> None:
    """Bars of how many documents are how long, and how many tokens are in documents of such a length, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    powers = np.arange(len(store.info.lengths))
    tokens = np.zeros(len(powers), np.int64)
    for begin in range(0, store.num_documents, 1 << 20):
        own = np.diff(store.offsets[begin : begin + (1 << 20) + 1])
        tokens += np.bincount(np.frexp(own)[1] - 1, own, len(powers)).astype(np.int64)
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    shown = [("documents", np.array(store.info.lengths)), ("million tokens", tokens / 1e6)]
    for axes, (label, counts) in zip(figure.subplots(1, 2), shown, strict=True):
        axes.bar(powers, counts)
        axes.set_xticks(powers[::2], [_short(2 ** int(power)) for power in powers[::2]], fontsize=7)
        axes.set_xlabel("tokens in the document, from this power of two on")
        axes.set_ylabel(label)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    figure.savefig(part, format="png", dpi=120)
    os.replace(part, path)


def _lengths_in_words(lengths: list[int]) -> str:
    """Shortest, middle and longest power of two that a document reaches."""
    counts = np.cumsum(lengths)
    first = int(np.searchsorted(counts, 1))
    middle = int(np.searchsorted(counts, (counts[-1] + 1) // 2))
    spans = [f"{2**power:,} to {2 ** (power + 1) - 1:,}" for power in (first, middle, len(lengths) - 1)]
    return f"shortest {spans[0]}, median {spans[1]}, longest {spans[2]} tokens"


def _short(number: int) -> str:
    for limit, unit in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if number >= limit:
            return f"{number // limit} {unit}"
    return str(number)
