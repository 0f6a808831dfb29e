"""Contradictions in `data.mixture`."""

from __future__ import annotations

from collections.abc import Iterator

from stack.config.schema_data import DataConfig
from stack.errors import Fault

KEY = "data.mixture"


def mixture_faults(data: DataConfig) -> Iterator[Fault]:
    """Names that logs could not tell apart, and shares that do not go together."""
    names = [part.name for part in data.mixture]
    if len(set(names)) < len(names):
        yield Fault(KEY, names, "another name for each part, since logs go by it", "name: books, name: code")
    for part in data.mixture:
        for kind, value in (("weight", part.weight), ("epochs", part.epochs)):
            if value is not None and value <= 0:
                fix = f"leave the part out, or {kind}: 1"
                yield Fault(f"{KEY}.{part.name}.{kind}", value, "a number above 0", fix)
    kinds = {(part.weight is not None, part.epochs is not None) for part in data.mixture}
    if len(kinds) > 1 or kinds == {(True, True)}:
        got = ", ".join(f"{part.name}: weight {part.weight}, epochs {part.epochs}" for part in data.mixture)
        want = "a weight for all parts, or epochs for all of them"
        yield Fault(KEY, got, want, "weight: 3, weight: 1; or epochs: 1, epochs: 2")
    if len(names) > 1 and data.train_tokenizer:
        want = "false with several parts, of which each would have ids of its own"
        yield Fault("data.train_tokenizer", True, want, "model.tokenizer=FOLDER data.train_tokenizer=false")
