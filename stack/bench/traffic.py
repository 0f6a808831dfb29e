"""Bytes and seconds of each kind of communication in a step.

Collectives are seen where torch hands them to the backend, so those of DeepSpeed, transformers and this stack count alike.
Each is timed from the moment at which all ranks are ready for it to its end, one after the other: what they cost where
nothing hides them, without the waiting for a slower rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import ScriptObject, Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stack.bench.calls import settle

EXCHANGES = ("c10d", "deepspeed")
"""Where operators that exchange anything are registered."""

KINDS = {
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
}
"""Part of an operator's name -> kind. DeepSpeed wraps its exchange into an operator of its own, `dim_zero_all_to_all`."""


@dataclass
class Exchanged:
    """Of one kind, on this rank. num_bytes: of the larger side of each call, what goes in or what comes out."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Traffic(TorchDispatchMode):
    """Inside the `with`, `kinds` fills. all_ready: returns when all ranks have called it; all have to make the same
    collectives in the same order, as they have to anyway."""

    def __init__(self, all_ready: Callable[[], None], device: torch.device) -> None:
        super().__init__()
        self.all_ready, self.device = all_ready, device
        self.kinds: dict[str, Exchanged] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (sent := collective(func, args)) is None:
            return func(*args, **(kwargs or {}))
        kind, num_bytes = sent
        settle(self.device)
        self.all_ready()
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, ScriptObject):
                Work.unbox(leaf).wait()
        settle(self.device)
        found = self.kinds.setdefault(kind, Exchanged())
        found.calls += 1
        found.num_bytes += num_bytes
        found.seconds += time.perf_counter() - start
        return result


def collective(func: Any, args: Any) -> tuple[str, int] | None:
    """(kind, bytes of the larger side) of a call, None where it is no collective."""
    space, name = func._schema.name.split("::")
    if space not in EXCHANGES or "barrier" in name:
        return None
    kind = next((kind for part, kind in KINDS.items() if part in name), name.strip("_"))
    return kind, max(_num_bytes(part) for part in args[:2])


def _num_bytes(part: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
