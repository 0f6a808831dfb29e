"""The obvious version of every fast operation: what the tests compare with, and what runs with a lever switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stack.ops.token_loss import IGNORE, LossOptions


def token_loss_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: LossOptions
) -> Tensor:
    """Sum of the token losses, with the whole logits in memory.

    hidden [tokens, hidden], weight [vocab, hidden], bias [vocab] or None, labels [tokens] with IGNORE where there is no
    target. Returns an fp32 scalar, 0 if there is no target.
    """
    logits = F.linear(hidden, weight, bias).float() * options.logit_scale
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    total = F.cross_entropy(
        logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=options.label_smoothing
    )
    if options.z_loss:
        log_z = torch.logsumexp(logits, dim=-1)
        total = total + options.z_loss * (log_z.square() * (labels != IGNORE)).sum()
    return total


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention inside each document, by the definition: softmax over a masked square matrix.

    query [rows, heads, seq, head_dim], key and value [rows, kv_heads, seq, head_dim]; cu_seqlens [documents + 1] over
    the flattened rows x seq tokens. window: a token sees itself and the window - 1 tokens before it.
    """
    rows, heads, seq, _ = query.shape
    repeats = heads // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    places = torch.arange(rows * seq)
    document = torch.searchsorted(cu_seqlens[1:].long(), places, right=True).view(rows, seq).to(query.device)
    distance = torch.arange(seq)[:, None] - torch.arange(seq)[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    visible = visible.to(query.device) & (document[:, :, None] == document[:, None, :])
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return scores.softmax(dim=-1).to(value.dtype) @ value
