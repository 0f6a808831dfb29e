"""Tests that need a GPU: `make gpu-test` runs them, anywhere else they are skipped with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.parity.conftest import folders

__all__ = ["folders"]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason_to_skip()
    for item in items:
        if reason and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=reason))


def _reason_to_skip() -> str:
    import torch

    if os.environ.get("LONG_SEQUENCE_GPU_TESTS") == "rehearsal":
        return ""
    if not torch.cuda.is_available():
        return "no GPU on this machine"
    if "LONG_SEQUENCE_GPU_TESTS" not in os.environ:
        return "all other tests run on CPU ranks: start these with `make gpu-test`"
    return ""
