"""A rank's slice of a micro-batch under sequence parallelism, cut from whole rows: for rows that are in memory anyway. What
comes from a token store is read by slice at once, in `data/slices.py`, whose slow twin this is."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stack.data.batch import IGNORE, MicroBatch


def shard_batch(batch: MicroBatch, sp: int, sp_rank: int) -> MicroBatch:
    """Cut [rows, seq] into [rows, seq_local]; labels are shifted already, so the cut loses no target.

    A length that `sp` does not divide is padded at each row's end with positions that have no target and are a document
    of their own. Document boundaries stay those of the whole (padded) rows: attention sees whole rows.
    """
    if sp == 1:
        return batch
    rows, seq = batch.input_ids.shape
    padding = -seq % sp
    seq_local = (seq + padding) // sp
    part = slice(sp_rank * seq_local, (sp_rank + 1) * seq_local)
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, padding))[:, part].contiguous(),
        labels=F.pad(batch.labels, (0, padding), value=IGNORE)[:, part].contiguous(),
        position_ids=F.pad(batch.position_ids, (0, padding))[:, part].contiguous(),
        cu_seqlens=_pad_rows(batch.cu_seqlens, rows, seq, padding),
    )


def _pad_rows(cu_seqlens: Tensor, rows: int, seq: int, padding: int) -> Tensor:
    if padding == 0:
        return cu_seqlens
    bounds = {bound + padding * (bound // seq) for bound in cu_seqlens.tolist()}
    bounds |= {row * (seq + padding) + seq for row in range(rows)}
    return torch.tensor(sorted(bounds), dtype=cu_seqlens.dtype)
