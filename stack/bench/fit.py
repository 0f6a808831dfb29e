"""How a cost grows with the length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit_bytes(tokens: Sequence[int], num_bytes: Sequence[float]) -> tuple[float, float] | None:
    """(fixed bytes, bytes a token) by least squares; None below two lengths."""
    return _fit(tokens, num_bytes, (0, 1))


def fit_seconds(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float] | None:
    """(seconds a token, seconds a token squared) by least squares; None below two lengths."""
    return _fit(tokens, seconds, (1, 2))


def _fit(
    tokens: Sequence[int], values: Sequence[float], powers: tuple[int, int]
) -> tuple[float, float] | None:
    """Errors count as shares of the value: otherwise the longest length alone would decide."""
    if len(set(tokens)) < 2:
        return None
    places, weights = np.asarray(tokens, dtype=float), 1.0 / np.asarray(values, dtype=float)
    columns = np.stack([weights * places**power for power in powers], axis=1)
    # Columns differ by the size of a length, which is lost to rounding unless they are brought to one size.
    sizes = np.linalg.norm(columns, axis=0)
    found = np.linalg.lstsq(columns / sizes, np.ones(len(places)), rcond=None)[0] / sizes
    return float(found[0]), float(found[1])
