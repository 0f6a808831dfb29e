"""Where the GPU tests run: on all GPUs of this machine, or, as a rehearsal, the same code on one CPU rank.

    LONG_SEQUENCE_GPU_TESTS=rehearsal python -m pytest tests/gpu

shows on a machine without a GPU that the tests themselves work, as far as a CPU takes what they ask for.
"""

from __future__ import annotations

import os

import torch

REHEARSAL = os.environ.get("LONG_SEQUENCE_GPU_TESTS") == "rehearsal"
DEVICE = "cpu" if REHEARSAL else "cuda"
COUNT = 1 if REHEARSAL else torch.cuda.device_count()
WORLD = min(COUNT, 2)
"""Ranks of the tests that need no more: two share each row where there are two GPUs."""
