"""The forecast's live bytes are what a real process has resident; `tests/resident_growth.py` shows longer rows."""

from __future__ import annotations

import sys

import pytest

from tests.resident_growth import MODEL, compare


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_warm_step_grows_by_what_was_forecast() -> None:
    """116 MiB of 2,048 tokens; within 3 %."""
    found = compare([*MODEL, "memory=plain", "data.seq_len=2048"], timeout_s=280)
    assert found.forecast > 100 << 20
    assert abs(found.off) < 0.03, found
