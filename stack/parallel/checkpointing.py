"""Activation checkpointing: a block keeps its input, on the device or on the host, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stack.ops.offload import OffloadToHost


def checkpoint_blocks(blocks: list[nn.Module], offload: bool, pin_memory: bool) -> None:
    """Wrap the forward of each block instance. offload: keep the inputs in host memory until backward."""
    for block in dict.fromkeys(blocks):  # a block may be applied several times
        block.forward = _checkpointed(block.forward, offload, pin_memory)


def _checkpointed(plain: Callable[..., Any], offload: bool, pin_memory: bool) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        # checkpoint() saves its positional tensors through the hooks around it: the hidden state goes to the host, and
        # everything saved inside the block is dropped as usual.
        with OffloadToHost(pin_memory) if offload else nullcontext():
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    return forward
