"""The fits of the benchmark find the numbers that made the points."""

from __future__ import annotations

import pytest

from stack.bench.fit import fit_bytes, fit_seconds

TOKENS = [4096, 16384, 32768]


def test_exact_points_are_met() -> None:
    line = fit_bytes(TOKENS, [2.5e8 + 9000 * tokens for tokens in TOKENS])
    assert line is not None
    assert (line.fixed, line.per_token, line.first) == pytest.approx((2.5e8, 9000, 4096))
    seconds = [4e-4 * tokens + 3e-8 * tokens**2 for tokens in TOKENS]
    assert fit_seconds(TOKENS, seconds) == pytest.approx((4e-4, 3e-8))


def test_errors_count_as_shares_of_the_value() -> None:
    """One point 10 % off: the fit comes nearer to the small values than plain least squares would."""
    seconds = [1e-3 * tokens for tokens in TOKENS]
    per_token, squared = fit_seconds(TOKENS, [*seconds[:2], 1.1 * seconds[2]]) or (0.0, 0.0)
    at_first = per_token * TOKENS[0] + squared * TOKENS[0] ** 2
    assert at_first == pytest.approx(seconds[0], rel=0.06)
    assert squared > 0


def test_a_peak_of_fixed_size_at_short_lengths_is_left_out() -> None:
    tokens = [1024, 2048, 4096, 8192, 16384]
    line = fit_bytes(tokens, [max(3e8, 2.5e8 + 9000 * number) for number in tokens])
    assert line is not None
    assert (line.fixed, line.per_token, line.first) == pytest.approx((2.5e8, 9000, 8192))


def test_small_deviations_use_all_lengths() -> None:
    line = fit_bytes(
        TOKENS,
        [
            factor * (1e8 + 9000 * tokens)
            for factor, tokens in zip((1.005, 0.995, 1.005), TOKENS, strict=True)
        ],
    )
    assert line is not None
    assert line.first == TOKENS[0]
    assert line.per_token == pytest.approx(9000, rel=0.03)


def test_one_length_gives_no_fit() -> None:
    assert fit_bytes([512], [1e6]) is None
    assert fit_seconds([512], [1.0]) is None
