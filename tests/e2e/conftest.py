"""The process that whole runs are forked from, started once for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forks import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started
