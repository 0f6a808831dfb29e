"""Who works on which heads, and how tensors move between the two layouts of Ulysses: a slice of the row with all heads, and
the whole row with a slice of the heads.

Buffers are [sp, rows, seq_local, heads_local, head_dim] with the receiving rank first, so that with one row in the batch
what arrives is the whole row as it lies, without a copy. None of this is seen by autograd; `ulysses.py` has the
differentiable version.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stack.errors import ModelError


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each rank of a row's group works on.

    kv_index: for each rank in turn the key/value heads sent to it, [sp * num_kv_local]. kv_copies: the number of ranks that
    each head goes to, where they are as many for all heads and heads go in order, as with a number of ranks that divides
    that of heads or is a multiple of it; else 0. q_to_kv: for this rank, the local key/value head of each local query head,
    or None where plain grouping gives the same.
    """

    num_q_local: int
    num_kv_local: int
    kv_index: list[int]
    kv_copies: int
    q_to_kv: list[int] | None


def plan_heads(num_q: int, num_kv: int, sp: int, sp_rank: int) -> HeadPlan:
    """Divide query heads evenly; send each rank the key/value heads that its query heads read, repeated where needed.

    Any `sp` that divides the query heads works: key/value heads are divided where they can be, and replicated where
    there are fewer than ranks; the gradients of a replicated head add up.
    """
    if num_q % sp:
        raise ModelError(f"{num_q} query heads cannot be divided over parallel.sp={sp} ranks")
    num_q_local, group = num_q // sp, num_q // num_kv
    needed = []
    for rank in range(sp):
        heads = range(rank * num_q_local, (rank + 1) * num_q_local)
        needed.append(sorted({head // group for head in heads}))
    num_kv_local = max(len(heads) for heads in needed)
    # The exchange is even, so ranks that need fewer heads get their last one again.
    kv_index = [head for heads in needed for head in heads + heads[-1:] * (num_kv_local - len(heads))]
    own = needed[sp_rank]
    first = sp_rank * num_q_local
    q_to_kv = [own.index((first + head) // group) for head in range(num_q_local)]
    grouped = num_q_local % num_kv_local == 0 and q_to_kv == [
        head // (num_q_local // num_kv_local) for head in range(num_q_local)
    ]
    copies = len(kv_index) // num_kv
    even = kv_index == [head for head in range(num_kv) for _ in range(copies)] and 1 in (copies, num_kv_local)
    return HeadPlan(num_q_local, num_kv_local, kv_index, copies if even else 0, None if grouped else q_to_kv)


def exchange(buffer: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Part j of [sp, ...] goes to rank j of the group; what comes back has the sender first. No copy at sp = 1."""
    if group is None:
        return buffer
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer, group=group)
    return received


def whole_rows(received: Tensor) -> Tensor:
    """[sp (sender), rows, seq_local, heads, dim] -> [rows, heads, seq, dim]; a view where the batch is one row."""
    sp, rows, seq_local, heads, dim = received.shape
    return received.transpose(0, 1).reshape(rows, sp * seq_local, heads, dim).transpose(1, 2)


def row_slices(whole: Tensor, sp: int) -> Tensor:
    """The transpose of `whole_rows`: [rows, heads, seq, dim] -> [sp (receiver), rows, seq_local, heads, dim]."""
    rows, heads, seq, dim = whole.shape
    return whole.transpose(1, 2).reshape(rows, sp, seq // sp, heads, dim).transpose(0, 1).contiguous()


def joined_heads(received: Tensor) -> Tensor:
    """[sp (sender), rows, seq_local, heads_local, dim] -> [rows, seq_local, heads * dim], a copy where heads lie apart."""
    _, rows, seq_local, *_ = received.shape
    return received.permute(1, 2, 0, 3, 4).reshape(rows, seq_local, -1)


def put_heads(buffer: Tensor, part: slice, first: int, heads: Tensor, plan: HeadPlan | None = None) -> None:
    """Write a tile of all heads into the send buffer, each head where its rank finds it.

    heads: [rows, num_heads, tile, dim]. part: the tile's positions. first: place of these heads among those of a rank.
    plan: for key/value heads, which of them go to several ranks; None: all are divided evenly.
    """
    copies = 1
    if plan is not None:
        copies = plan.kv_copies or 1
        heads = heads if plan.kv_copies else heads[:, plan.kv_index]
    # By views alone: an index would have to be brought to a GPU for each tile.
    rows, num, tile, dim = heads.shape
    local = num * copies // buffer.shape[0]
    by_rank = heads.view(rows, -1, local, tile, dim).permute(1, 0, 3, 2, 4)[:, None]
    buffer.unflatten(0, (-1, copies))[:, :, :, part, first : first + local] = by_rank


def take_heads(
    buffer: Tensor, part: slice, first: int, num: int, total: int, plan: HeadPlan | None = None
) -> Tensor:
    """The transpose of `put_heads`: a tile of all `total` heads, [rows, total, tile, dim]; heads sent to several ranks
    are summed, in fp32 where the plan has `kv_copies`. num: heads of one rank."""
    by_rank = buffer[:, :, part, first : first + num]
    if plan is not None and plan.kv_copies > 1:
        by_rank = by_rank.unflatten(0, (-1, plan.kv_copies)).sum(dim=1)
    sp, rows, tile, _, dim = by_rank.shape
    heads = by_rank.permute(1, 0, 3, 2, 4).reshape(rows, sp * num, tile, dim)
    if plan is None or plan.kv_copies:
        return heads
    places = torch.tensor(plan.kv_index, device=heads.device)
    return heads.new_zeros(rows, total, tile, dim).index_add_(1, places, heads)
