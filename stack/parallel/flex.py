"""torch's flex_attention over packed documents (GPU only: it has no backward on the CPU)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

MAX_BLOCKS = 512
"""Blocks a row, at most: the block mask holds their square, so longer rows get larger blocks, never a larger mask."""


def flex_documents(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int | None
) -> Tensor:
    """query [rows, heads, seq, head_dim], key and value [rows, kv_heads, seq, head_dim] -> like query.

    cu_seqlens, window: as in `ops.attention.sdpa_documents`.
    """
    rows, _, seq, _ = query.shape
    mask = _block_mask(tuple(cu_seqlens.tolist()), rows, seq, window, str(query.device))
    return _compiled()(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


@lru_cache(maxsize=1)
def _compiled():
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=2)
def _block_mask(bounds: tuple[int, ...], rows: int, seq: int, window: int | None, device: str) -> BlockMask:
    """One for all layers of a micro-batch; the cache holds the last two (windowed and full layers)."""
    ends = torch.tensor(bounds[1:], device=device)
    document = torch.searchsorted(ends, torch.arange(rows * seq, device=device), right=True).view(rows, seq)

    def visible(row: Tensor, head: Tensor, q_place: Tensor, kv_place: Tensor) -> Tensor:
        same = (document[row, q_place] == document[row, kv_place]) & (q_place >= kv_place)
        return same & (q_place - kv_place < window) if window is not None else same

    block = 128 * math.ceil(seq / (128 * MAX_BLOCKS))
    return create_block_mask(visible, rows, None, seq, seq, device=device, BLOCK_SIZE=block, _compile=True)
