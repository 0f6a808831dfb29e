"""Causal attention over packed documents, by document boundaries and never by a mask that grows with the square of the
length. At 131,072 local tokens such a mask takes 16 GiB."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sdpa_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """torch's scaled_dot_product_attention, one call a document.

    query [rows, heads, seq, head_dim], key and value [rows, kv_heads, seq, head_dim]; cu_seqlens [documents + 1], int32 on
    the CPU, boundaries over the flattened rows x seq tokens. window: a token sees itself and the window - 1 tokens
    before it. Returns [rows, heads, seq, head_dim]. Reference: `reference.document_attention`.
    """
    seq = query.shape[2]
    bounds = cu_seqlens.tolist()
    rows: list[list[Tensor]] = [[] for _ in range(query.shape[0])]
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        if begin == end:
            continue
        row, start = divmod(begin, seq)
        part = (slice(row, row + 1), slice(None), slice(start, start + end - begin))
        rows[row].append(_causal(query[part], key[part], value[part], scale, window, dropout))
    return torch.cat([torch.cat(parts, dim=2) for parts in rows])


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, dropout: float
) -> Tensor:
    """Attention inside one document. All tensors [1, heads or kv_heads, length, head_dim]."""
    length, repeats = query.shape[2], query.shape[1] // key.shape[1]
    if window is None or window >= length:
        if query.is_cuda and query.dtype == torch.float32:
            # The only fp32 kernel there that does not write out the square of scores takes no grouped heads.
            key, value, repeats = *(part.repeat_interleave(repeats, dim=1) for part in (key, value)), 1
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=repeats > 1
        )
    blocks = []
    # Blocks of `window` queries see at most 2 * window - 1 keys: the mask is bounded by the window, whatever the length.
    for start in range(0, length, window):
        stop = min(start + window, length)
        first = max(0, start - window + 1)
        distance = torch.arange(start, stop)[:, None] - torch.arange(first, stop)[None, :]
        visible = ((distance >= 0) & (distance < window)).to(query.device)
        # No masked kernel takes grouped heads on every device, so the block's keys are repeated.
        keys, values = (part[:, :, first:stop].repeat_interleave(repeats, dim=1) for part in (key, value))
        block = query[:, :, start:stop]
        blocks.append(
            F.scaled_dot_product_attention(
                block, keys, values, attn_mask=visible, scale=scale, dropout_p=dropout
            )
        )
    return torch.cat(blocks, dim=2)
