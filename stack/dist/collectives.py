"""Differentiable collectives. Each backward is the exact transpose of its forward; nothing is averaged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Part j of rank i went to part i of rank j: the transpose is the same exchange.
        grad = grads[0].contiguous()
        sent_back = torch.empty_like(grad)
        dist.all_to_all_single(sent_back, grad, group=ctx.group)
        return sent_back, None


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part j of `parts` to rank j of the group and receive part i from rank i.

    parts: [group size, ...], contiguous. Returns the same shape; index 0 is the sending rank.
    """
    return _AllToAll.apply(parts.contiguous(), group)
