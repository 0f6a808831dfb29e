"""What a layer keeps for its backward, in bytes, and the host memory and file that this takes with `memory.offload`.

The one formula of the check at the start of a run (train/host_room.py), the forecast (plan/traffic.py) and the advice after
memory ran out (train/memory_advice.py). It repeats what ops/host_store.py and ops/offload.py do with every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stack.config import derive
from stack.config.model_checks import KEEPS_SCORES
from stack.config.schema import RunConfig

SLAB = 16 << 20
"""Bytes of a slab of a lean run's host memory, unless a layer keeps less. A power of two: torch rounds page-locked memory up
to one."""

ALIGN = 64
"""Bytes between the starts of tensors in a layer's slabs are a multiple of it, which suits every type."""

PAGE = 4096
"""Bytes. Lengths, places in a spill file and addresses in memory are multiples of it, as unbuffered I/O wants."""


class Sizes(Protocol):
    """Of a model, as in `stack.models.spec.ModelSpec` and `stack.plan.shape.Shape`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class HostBytes:
    """Of one rank, when all layers are kept. in_file: written to `memory.spill_folder`. layer: of one lean layer in memory,
    the least that `memory.host_gib` can be; 0 for others, which do not spill."""

    in_memory: int = 0
    in_file: int = 0
    layer: int = 0


def layer_tensors(cfg: RunConfig, sizes: Sizes, lean: bool) -> list[int]:
    """Bytes of each tensor that one layer keeps of a micro-batch on one rank, wherever they lie.

    lean: the blocks run as lean layers, which `memory.lean` asks for and not every family can. A plain layer keeps what
    autograd saves, of which nothing is said here: [].
    """
    memory = cfg.memory
    width = 4 if cfg.engine.precision == "fp32" else 2
    tokens = cfg.data.micro_batch * derive.seq_local(cfg.data, cfg.parallel)
    hidden = tokens * sizes.hidden * width
    if not lean:
        return [hidden] if memory.checkpointing == "full" else []
    mixed = tokens * sizes.num_heads * sizes.head_dim * width
    # A kernel that cannot hand out its log-sum-exp runs again, and none is kept (parallel/kernels.py). Nor with a sliding
    # window on CPU ranks, which the formula leaves aside: it is at most 2 % of a layer.
    scores = [4 * tokens * sizes.num_heads] if cfg.model.attention in KEEPS_SCORES else []
    return [hidden, mixed, *scores]


def host_bytes(cfg: RunConfig, sizes: Sizes, lean: bool, on_gpu: bool) -> HostBytes:
    """Host memory and file that kept activations take; nothing without `memory.offload`. lean: see `layer_tensors`.

    Lean layers are cut into slabs, checkpointed ones take a buffer each. torch rounds each page-locked buffer up to a power
    of two, which slabs are unless a layer is smaller than one.
    """
    memory = cfg.memory
    tensors = layer_tensors(cfg, sizes, lean)
    if not memory.offload or not tensors:
        return HostBytes()
    taken = page_locked if on_gpu and memory.pin_memory else int
    if not lean:
        return HostBytes(sizes.num_layers * sum(taken(num_bytes) for num_bytes in tensors))
    length = sum(up_to(num_bytes, ALIGN) for num_bytes in tensors)
    slab = min(length, SLAB)
    if memory.spill_folder is None or memory.host_gib is None:
        layer = -(-length // slab) * taken(slab)
        return HostBytes(sizes.num_layers * layer, 0, layer)
    slab, bound = up_to(slab, PAGE), int(memory.host_gib * 2**30)
    layer = up_to(length, slab)
    # Behind each layer there is to be room for the next, so that many stay unwritten.
    unwritten = min(max((bound - length) // layer, 0), sizes.num_layers)
    held = min(max(bound // layer, 1), sizes.num_layers)
    return HostBytes(held * layer // slab * taken(slab), (sizes.num_layers - unwritten) * layer, layer)


def page_locked(num_bytes: int) -> int:
    """What torch takes for page-locked memory: the next power of two (2.13, ATen/core/CachingHostAllocator.h)."""
    return 1 << (num_bytes - 1).bit_length()


def up_to(num_bytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-num_bytes // unit) * unit
