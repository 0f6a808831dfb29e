"""Bytes that a step moves between ranks and to the host, and what that keeps on the host."""

from __future__ import annotations

from dataclasses import dataclass

from stack.config.kept import host_bytes, layer_tensors
from stack.plan.settings import Settings
from stack.plan.step import Counted

OPTIMIZER_COPIES = 18
"""Bytes an element that an optimizer on the host moves in a step: fp32 gradients out, back, out again and once more for
their norm, 16-bit weights back (DeepSpeed 0.19, `partition_grads` of stage3.py; as the exact count has it)."""


@dataclass(frozen=True)
class Traffic:
    """Of one rank and optimizer step, in bytes. host_bytes: of kept activations, both ways; optimizer_bytes:
    of gradients and weights, where the optimizer is on the host; kept_bytes: host memory that kept activations take;
    spilled_bytes: of the local disk, written and read again for each micro-batch."""

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
    kept = host_bytes(cfg, settings.shape, settings.lean, on_gpu=cfg.site.device != "cpu")
    states, on_host = counted.states, cfg.engine.offload_optimizer != "none"
    return Traffic(
        exchange_bytes=times * settings.shape.num_layers * _exchanged(settings),
        gathered_bytes=times * counted.gathered_bytes + counted.renewed_bytes if settings.world > 1 else 0,
        reduced_bytes=times * counted.reduced_bytes if settings.world > 1 else 0,
        host_bytes=times * 2 * _copied(settings),
        optimizer_bytes=OPTIMIZER_COPIES * states.trained_elements if on_host else 0,
        kept_bytes=kept.in_memory,
        spilled_bytes=kept.in_file,
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


def _copied(settings: Settings) -> int:
    """Bytes that go to the host in a forward."""
    if not settings.cfg.memory.offload:
        return 0
    return settings.shape.num_layers * sum(layer_tensors(settings.cfg, settings.shape, settings.lean))
