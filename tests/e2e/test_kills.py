"""Ten of the kills of `kills.py`; the script by itself does a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.kills import Siege, besiege
from tests.forks import Nursery


@pytest.mark.timeout(600)
def test_ten_kills_lose_nothing(nursery: Nursery, tmp_path: Path) -> None:
    found = besiege(Siege(tmp_path, nursery, seed=6), 10)
    assert found["kills"] == 10
    assert found["resumes_from_newest"] >= 2 and found["runs_equal_to_the_unbroken"] >= 1
    assert len(found["targets"]) == 3 and len(found["moments"]) >= 2
