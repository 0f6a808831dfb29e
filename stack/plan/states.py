"""Parameters, gradients and optimizer states of one rank, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stack.plan.forecast import BUCKETS, GRADIENTS, OPTIMIZER, PARAMETERS
from stack.plan.settings import Settings
from stack.plan.zero3 import Param

NORM_PART = 250_000_000
"""Elements of a gradient whose squares DeepSpeed sums at a time (runtime/zero/stage3.py: _constant_buffered_norm2)."""


@dataclass(frozen=True)
class States:
    """Bytes. The first four on the device between steps; host_*: in host memory in their place."""

    parameters: int
    gradients: int
    optimizer: int
    buckets: int
    largest_group: int
    """Of the copy of gradients that the update of one group makes on the device."""
    host_optimizer: int
    host_parameters: int
    nvme: int
    """The optimizer's files on an NVMe disk."""
    written: int
    """One rank's part of a checkpoint."""
    trained_elements: int
    """Of this rank's shard."""
    moments: int = 0
    """Part of `optimizer` that Adam makes in its first step."""

    def before_first_step(self) -> list[tuple[str, int]]:
        """Bytes by category when the engine stands."""
        return [
            (PARAMETERS, self.parameters),
            (GRADIENTS, self.gradients),
            (OPTIMIZER, self.optimizer - self.moments),
            (BUCKETS, self.buckets),
        ]


def states_of(settings: Settings, params: Sequence[Param]) -> States:
    """ZeRO-3 shards everything; stage 2 gradients and optimizer states, stage 1 the latter, stage 0 nothing."""
    cfg, world = settings.cfg, settings.zero.world
    width, stage = settings.work.width, cfg.engine.stage
    trained = [param for param in params if param.trained]
    sharded = sum(-(-param.numel // world) for param in trained)
    every = sum(-(-param.numel // world) for param in params)
    moments = 2 if cfg.optim.name == "adamw" else 0
    optimizer = sharded * 4 * (1 + moments)
    whole, whole_trained = sum(param.numel for param in params), sum(param.numel for param in trained)
    if stage == 3:
        parameters, gradients, buckets = every * width, sharded * 4, 4 * settings.zero.bucket
    else:
        parameters = whole * width
        gradients = 4 * (sharded if stage == 2 else whole_trained)
        buckets = settings.zero.reduce_width * min(settings.zero.bucket, whole_trained) if stage else 0
        if stage == 0:
            optimizer = whole_trained * 4 * (moments + (width != 4))
    on_host = cfg.engine.offload_optimizer != "none"
    away = cfg.engine.offload_param != "none" and stage == 3
    group = 4 * min(sharded, settings.sub_group)
    if on_host:  # the norm of one shard's gradient at a time is taken on the device, of parts of it in fp64
        largest = max((-(-param.numel // world) for param in trained), default=0)
        group = 4 * largest + 8 * (min(largest, NORM_PART) if stage == 3 else largest)
    # On the host: fp32 gradients twice, the partition's buffer and those that the optimizer reads.
    host_optimizer = optimizer + 2 * 4 * sharded if cfg.engine.offload_optimizer == "cpu" else 0
    nvme = 0
    if cfg.engine.offload_optimizer == "nvme":
        nvme = optimizer + 4 * sharded
        # The partition's buffer, and those that files are read into; all gradients pass the device before the first is written.
        host_optimizer = 4 * sharded + 4 * settings.nvme_buffers * min(sharded, settings.sub_group)
        group += 4 * (sharded - largest)
    return States(
        parameters=0 if away else parameters,
        gradients=0 if on_host else gradients,
        optimizer=0 if on_host else optimizer,
        buckets=buckets,
        largest_group=group,
        host_optimizer=host_optimizer,
        host_parameters=parameters if away and cfg.engine.offload_param == "cpu" else 0,
        nvme=nvme,
        # Without ZeRO the first rank writes for all.
        written=(0 if stage == 3 else parameters // world) + (optimizer if stage else optimizer // world),
        trained_elements=sharded,
        moments=0 if on_host else 4 * moments * (sharded if stage else whole_trained),
    )
