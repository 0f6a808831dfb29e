"""How a cost grows with the length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ON_A_LINE = 0.01
"""Largest error, as a share of the value, of bytes that lie on a line."""


@dataclass(frozen=True)
class Line:
    """fixed + per_token x tokens, from `first` tokens on."""

    fixed: float
    per_token: float
    first: int


def fit_bytes(tokens: Sequence[int], num_bytes: Sequence[float]) -> Line | None:
    """By least squares; None below two lengths. tokens: rising.

    At short lengths something that does not grow can set the peak (the reduction of gradients, for one). So lengths are
    left out, from the short end, until the others lie on a line or two are left.
    """
    for skipped in range(len(tokens) - 1):
        places, values = (
            np.asarray(tokens[skipped:], dtype=float),
            np.asarray(num_bytes[skipped:], dtype=float),
        )
        fixed, per_token = _fit(places, values, (0, 1))
        errors = np.abs(fixed + per_token * places - values) / values
        if errors.max() <= ON_A_LINE or len(places) == 2:
            return Line(fixed, per_token, tokens[skipped])
    return None


def fit_seconds(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float] | None:
    """(seconds a token, seconds a token squared) by least squares; None below two lengths."""
    if len(tokens) < 2:
        return None
    return _fit(np.asarray(tokens, dtype=float), np.asarray(seconds, dtype=float), (1, 2))


def _fit(places: np.ndarray, values: np.ndarray, powers: tuple[int, int]) -> tuple[float, float]:
    """Errors count as shares of the value: otherwise the longest length alone would decide."""
    columns = np.stack([places**power / values for power in powers], axis=1)
    # Columns differ by the size of a length, which is lost to rounding unless they are brought to one size.
    sizes = np.linalg.norm(columns, axis=0)
    found = np.linalg.lstsq(columns / sizes, np.ones(len(places)), rcond=None)[0] / sizes
    return float(found[0]), float(found[1])
