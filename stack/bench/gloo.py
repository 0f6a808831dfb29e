"""What gloo holds: inside a collective beside its tensors, which no dispatch mode sees, and for a moment behind it.

The former is as of torch 2.13 (ProcessGroupGloo.cpp) and its gloo; `tests/unit/test_bench_gloo.py` compares it with resident
memory. NCCL works in buffers of its own, which do not grow with the tensors.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import ScriptObject, Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_leaves, tree_map_only

SEGMENT = 1 << 20
"""Bytes of a segment of gloo's ring at the most (kMaxSegmentSize in gloo/allreduce.h and reduce.h)."""

LET_GO_S = 30.0
"""For gloo's threads to let go of what they sent."""

Holders = list[tuple[Tensor, tuple[int, int]]]
"""Real tensors in the arguments of a collective, each with how many hold it, and how many tensors its storage."""


def gloo_bytes(func: Any, args: Any) -> int:
    """Bytes above those of the tensors, from the call until it is waited for. func: an operator of the space `c10d`; 0 for
    those that this stack and DeepSpeed do not call.

    An all-gather receives into one flat tensor and copies that to its outputs; a reduce-scatter is an all-reduce of a copy
    of its input, of which each rank takes its part; an all-reduce and a reduce work on two segments at once. All-to-all and
    broadcast work in place.
    """
    name = func._schema.name.removeprefix("c10d::")
    if name in ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"):
        return _num_bytes(args[0])
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        tensors = tree_leaves(args[1])
        return sum(_num_bytes(tensor) + _segments(tensor, args) for tensor in tensors)
    if name in ("allreduce_", "reduce_"):
        return sum(_segments(tensor, args) for tensor in tree_leaves(args[0]))
    return 0


def _segments(tensor: Tensor, args: Any) -> int:
    """Two segments: as many of the same size as a multiple of the ranks that none is too large, two a rank at least."""
    ranks = ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, ScriptObject))).size()
    num_bytes = _num_bytes(tensor)
    if ranks == 1 or not num_bytes:
        return 0
    number = -(-max(-(-num_bytes // SEGMENT), 2 * ranks) // ranks) * ranks
    return 2 * -(-num_bytes // number)


def _num_bytes(part: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(part) if isinstance(leaf, Tensor))


def holders_of_all(args: Any) -> Holders:
    """To be asked before the collective is called."""
    leaves = tree_leaves(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)]
    return [(tensor, _holders(tensor)) for tensor in tensors]


def until_let_go(results: list[Any], before: Holders) -> Any:
    """The one result, with a finished work in place of gloo's, which holds tensors as its threads do. results: must be
    its only holder. Raises RuntimeError if gloo does not let go."""
    if before:
        results = tree_map_only(ScriptObject, _finished, results)
    limit = time.monotonic() + LET_GO_S
    while any(
        more > less for tensor, users in before for more, less in zip(_holders(tensor), users, strict=True)
    ):
        if time.monotonic() > limit:
            raise RuntimeError(f"gloo still holds a collective's tensors after {LET_GO_S:.0f} s")
        time.sleep(0)
    return results[0]


def _holders(tensor: Tensor) -> tuple[int, int]:
    users: int = getattr(tensor, "_use_count")()  # noqa: B009  torch's stubs lack it
    return users, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _finished(work: ScriptObject) -> ScriptObject:
    Work.unbox(work).wait()
    return FakeWork().boxed()
