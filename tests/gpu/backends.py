"""The attention kernels that can be asked for by name, and which of them run here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stack.models.attention import attention_faults
from stack.parallel.ulysses import AttentionSettings, install_attention
from tests.gpu.machine import DEVICE

BACKENDS = (
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "kernels-community/flash-attn2",
    "kernels-community/vllm-flash-attn3",
)


def attention_or_skip(backend: str) -> nn.Module:
    """A module that stands for a model's attention, set to `backend`. Skips the test if that is not installed.

    Tests have no network, so a kernel of the Hub has to be in the folder that KERNELS_CACHE names.
    """
    faults = attention_faults(backend, DEVICE, torch.bfloat16)
    if faults:
        pytest.skip(str(faults[0]))
    module = nn.Module()
    try:
        install_attention([module], SimpleNamespace(), AttentionSettings(backend, 1, 0, None))
    except ValueError as error:  # transformers says so whatever keeps it from loading a kernel of the Hub
        if "/" not in backend:
            raise
        pytest.skip(f"{backend} is not here: {error}")
    return module
