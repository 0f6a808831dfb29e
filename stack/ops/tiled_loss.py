"""Head and loss in tiles of tokens: the logits of the whole sequence never exist.

Each tile's logits turn into its gradients at once, in forward, which costs three matmuls in place of the four of a
recomputing version. The gradients kept are those of the unscaled sum; backward multiplies hidden states' and head's
alike by the factor that arrives, so accumulation, loss scaling and data-parallel weights reach both. (A version that
adds to the head's gradient in forward is wrong by that factor: DeepSpeed's TiledFusedLogitsLoss at accumulation 2
trains the head with twice its gradient.)

The head's gradient is summed over tiles in fp32 and handed to autograd once, so it is exact under ZeRO hooks and with
tied embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stack.ops.token_loss import IGNORE, LossOptions


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        tile: int,
        options: LossOptions,
        with_grad: bool,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = (needed and with_grad for needed in ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        for start in range(0, hidden.shape[0], tile):
            part = slice(start, start + tile)
            loss, grad_logits = _tile_loss(hidden[part], weight, bias, labels[part], options, with_grad)
            total += loss
            if grad_logits is None:
                continue
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            # In fp32 before the cast: under fp16 the unscaled gradient times 1 / targets alone would underflow.
            None if grad is None else (grad.float() * grads[0]).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


def _tile_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: LossOptions, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss sum of one tile, and d(sum)/d(raw logits) in fp32, [tokens, vocab]."""
    logits = F.linear(hidden, weight, bias).float()
    if options.logit_scale != 1.0:
        logits *= options.logit_scale
    if options.softcap:
        logits = logits.div_(options.softcap).tanh_().mul_(options.softcap)
    has_target = labels != IGNORE
    target = labels.clamp_min(0)[:, None]
    smoothing = options.label_smoothing
    losses = (smoothing - 1.0) * logits.gather(1, target).squeeze(1)
    if smoothing:
        losses -= smoothing * logits.mean(dim=-1)
    # Slope of the soft cap, from its output: 1 - (y / c)^2.
    slope = 1.0 - (logits / options.softcap).square() if options.softcap and with_grad else None
    # Softmax in place: exp is taken once, for the loss and for its gradient, and no second tile is held.
    highest = logits.amax(dim=-1, keepdim=True)
    grad = logits.sub_(highest).exp_()
    total = grad.sum(dim=-1, keepdim=True)
    log_z = (total.log() + highest).squeeze(1)
    losses += log_z
    if options.z_loss:
        losses += options.z_loss * log_z.square()
    loss = losses.masked_fill(~has_target, 0.0).sum()
    if not with_grad:
        return loss, None

    # Rows without a target by factors of 0: a mask over [tokens, vocab] would take as long as exp.
    counts = has_target.float()[:, None]
    grad *= counts * (1.0 + 2.0 * options.z_loss * log_z[:, None]) / total
    if smoothing:
        grad -= counts * (smoothing / grad.shape[1])
    grad.scatter_add_(1, target, counts * (smoothing - 1.0))
    if slope is not None:
        grad *= slope
    if options.logit_scale != 1.0:
        grad *= options.logit_scale
    return loss, grad


def tiled_token_loss_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tile: int, options: LossOptions
) -> Tensor:
    """Sum of the token losses, `tile` tokens at a time; same shapes and result as `reference.token_loss_sum`.

    Beside its inputs it holds one tile of fp32 logits, a gradient like `hidden` and an fp32 gradient like
    `weight` until backward.
    """
    if tile < 1:
        raise ValueError(f"tile={tile}: expected at least 1 token")
    # A Function sees which inputs require a gradient, not whether one is wanted: evaluation must not pay for it.
    return _TiledLoss.apply(hidden, weight, bias, labels, tile, options, torch.is_grad_enabled())
