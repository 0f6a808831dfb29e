"""Tensors that backward needs, kept in host memory in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OffloadToHost(torch.autograd.graph.saved_tensors_hooks):
    """Context in which every tensor that autograd saves moves to host memory, and comes back when backward asks.

    Model parameters stay where they are: they live in the ZeRO engine, and a copy of one would be a stale copy. pin_memory: page-locked memory, for a copy that does not block the device; ignored on CPU
    devices, where the copy is made all the same so that the same code runs.
    """

    def __init__(self, pin_memory: bool):
        def pack(tensor: Tensor) -> Any:
            if isinstance(tensor, torch.nn.Parameter):
                return tensor
            pinned = pin_memory and tensor.device.type != "cpu"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            host.copy_(tensor, non_blocking=pinned)
            return tensor.device, host

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, host = packed
            return host.clone() if device.type == "cpu" else host.to(device, non_blocking=host.is_pinned())

        super().__init__(pack, unpack)
