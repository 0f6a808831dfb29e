"""Bytes that a step moves between ranks and to the host, and what that keeps on the host."""

from __future__ import annotations

from dataclasses import dataclass

from stack.plan.settings import Settings
from stack.plan.step import Counted

OPTIMIZER_COPIES = 18
"""Bytes an element that an optimizer on the host moves in a step: fp32 gradients out, back, out again and once more for
their norm, 16-bit weights back (DeepSpeed 0.19, `partition_grads` of stage3.py; as the exact count has it)."""

SLAB, ALIGN, FEW = 16 << 20, 64, 64
"""Of `ops/host_store.py`: bytes of a slab of host memory, of the places in it, and how many of a small one make a layer."""


@dataclass(frozen=True)
class Traffic:
    """Of one rank and optimizer step, in bytes. host_bytes: of kept activations, both ways; optimizer_bytes:
    of gradients and weights, where the optimizer is on the host."""

    exchange_bytes: int
    gathered_bytes: int
    reduced_bytes: int
    host_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    spilled_bytes: int

    def by_kind(self) -> dict[str, int]:
        """Kinds as `stack/bench/traffic.py` names them; the larger side of each call."""
        found = {
            "all-to-all": self.exchange_bytes,
            "all-gather": self.gathered_bytes,
            "reduce-scatter": self.reduced_bytes,
        }
        return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes}


def traffic_of(settings: Settings, counted: Counted) -> Traffic:
    cfg = settings.cfg
    times = cfg.engine.accumulation
    kept = _kept(settings)
    bound = None if cfg.memory.host_gib is None else round(cfg.memory.host_gib * 2**30)
    states, on_host = counted.states, cfg.engine.offload_optimizer != "none"
    in_memory = kept if bound is None else min(kept, bound)
    return Traffic(
        exchange_bytes=times * settings.shape.num_layers * _exchanged(settings),
        gathered_bytes=times * counted.gathered_bytes + counted.renewed_bytes if settings.world > 1 else 0,
        reduced_bytes=times * counted.reduced_bytes if settings.world > 1 else 0,
        host_bytes=times * 2 * _copied(settings),
        optimizer_bytes=OPTIMIZER_COPIES * states.trained_elements if on_host else 0,
        kept_bytes=in_memory,
        spilled_bytes=kept - in_memory,
    )


def _exchanged(settings: Settings) -> int:
    """All-to-alls of one layer. Forward: q, k, v, then the output; the same back. A checkpointed layer runs forward twice;
    a lean one sends q, k and v again, and the output beside its gradient."""
    work = settings.work
    if work.sp == 1:
        return 0
    inputs = work.query + 2 * work.key_spread
    there, back = inputs + work.query, inputs + work.query
    if settings.lean:
        return there + 2 * work.query + inputs + inputs
    return there * (2 if settings.cfg.memory.checkpointing == "full" else 1) + back


def _layer_tensors(settings: Settings) -> list[int]:
    """Bytes of the tensors of one layer that go to the host."""
    work = settings.work
    if not settings.cfg.memory.offload:
        return []
    if not settings.lean:
        return [work.hidden]
    # A kernel that cannot hand out its log-sum-exp runs again, and none is kept.
    return [work.hidden, work.query, *([work.scores] if work.attention == "sdpa" else [])]


def _copied(settings: Settings) -> int:
    return settings.shape.num_layers * sum(_layer_tensors(settings))


def _kept(settings: Settings) -> int:
    """Host memory that they take: slabs of lean layers, page-locked tensors of checkpointed ones."""
    tensors = _layer_tensors(settings)
    if not tensors:
        return 0
    layers = settings.shape.num_layers
    if settings.lean:
        layer = sum(-(-size // ALIGN) * ALIGN for size in tensors)
        slab = min(layer, SLAB)
        return layers * -(-layer // slab) * slab
    pinned = settings.cfg.memory.pin_memory and settings.cfg.site.device != "cpu"
    # torch rounds page-locked memory up to a power of two.
    return layers * (1 << (tensors[0] - 1).bit_length() if pinned else tensors[0])
