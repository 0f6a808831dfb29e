"""A few kills of preparation at random moments; `python tests/prepare_kills.py --kills 50` for many."""

from __future__ import annotations

from pathlib import Path

from tests.prepare_kills import run_kills


def test_killed_at_random_moments(tmp_path: Path) -> None:
    assert run_kills(3, seed=7, folder=tmp_path, kib=512).startswith("3 kills")
