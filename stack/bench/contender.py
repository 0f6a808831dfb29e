"""One training step of a memory preset, assembled as `train/run.py` does it, on random rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from stack.config.schema import RunConfig
from stack.data.batch import IGNORE, MicroBatch
from stack.dist.topology import Topology
from stack.engine.build import build_engine
from stack.engine.ds_config import build_ds_config
from stack.engine.zero_init import join_deepspeed, zero3_partitioner
from stack.methods import build_method
from stack.models.build import DTYPES, BuiltModel, build_model
from stack.parallel.apply import apply_parallelism
from stack.parallel.shard_batch import shard_batch


class Contender(Protocol):
    """What the benchmark measures."""

    built: BuiltModel

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model; its parameters are ZeRO-3 shards."""
        ...

    def passes(self, batch: MicroBatch, num_targets: int) -> float:
        """Forward and backward on this rank's slice of the rows. num_targets: of all ranks.

        Returns the local sum of token losses in nats.
        """
        ...

    def update(self, lr: float) -> float:
        """Optimizer step. Returns the global gradient norm before clipping."""
        ...

    def close(self) -> None:
        """Remove DeepSpeed's hooks and buffers."""
        ...


def plain_model(cfg: RunConfig, topology: Topology) -> tuple[BuiltModel, dict[str, Any]]:
    """The unchanged transformers model with its weights sharded, and DeepSpeed's settings: the same for all contenders."""
    join_deepspeed(topology)
    ds_config, dtype = build_ds_config(cfg, topology.world), DTYPES[cfg.engine.precision]
    partition: Callable[[nn.Module], None] | None = None
    if cfg.engine.stage == 3:
        partition = zero3_partitioner(ds_config, dtype)
    return build_model(cfg.model, cfg.data.seq_len, dtype, cfg.seed, partition, topology.is_main), ds_config


class Preset:
    """A preset of `conf/memory`."""

    def __init__(self, cfg: RunConfig, topology: Topology):
        self.built, ds_config = plain_model(cfg, topology)
        model, spec = self.built.model, self.built.spec
        apply_parallelism(model, spec, cfg.memory, cfg.model.attention, cfg.engine.stage, topology)
        self.engine = build_engine(model, cfg.optim, topology, ds_config)
        self.method = build_method(cfg.method)

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    def passes(self, batch: MicroBatch, num_targets: int) -> float:
        return self.engine.forward_backward(self.method, batch, num_targets).item()

    def update(self, lr: float) -> float:
        return self.engine.step(lr).grad_norm

    def close(self) -> None:
        self.engine.close()


def random_rows(cfg: RunConfig, vocab: int, topology: Topology) -> tuple[MicroBatch, int]:
    """This rank's slice of rows of one document each, and the targets of all ranks."""
    rows, seq = cfg.data.micro_batch, cfg.data.seq_len
    generator = torch.Generator().manual_seed(cfg.seed + topology.dp_rank)
    ids = torch.randint(vocab, (rows, seq), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((rows, 1), IGNORE)], dim=1)
    positions = torch.arange(seq).expand(rows, seq).contiguous()
    bounds = torch.arange(0, (rows + 1) * seq, seq, dtype=torch.int32)
    whole = MicroBatch(ids, labels, positions, bounds, (seq,) * rows)
    return shard_batch(whole, topology.sp, topology.sp_rank), rows * (seq - 1) * topology.dp
