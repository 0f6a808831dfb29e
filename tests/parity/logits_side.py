"""What each rank runs where logits are looked at: those of the engine's own forward, whole again on rank 0; and a short
training whose model is then exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stack.checkpoint.export_hf import export_hf
from stack.config.schema import MethodConfig, RunConfig
from stack.data.batch import MicroBatch
from stack.dist.topology import Topology
from stack.engine.handle import Engine
from stack.methods.pretrain import Pretrain
from stack.models.build import check_positions
from stack.models.spec import head
from stack.parallel.shard_batch import shard_batch
from tests.parity.rank_side import assemble_both, pack
from tests.parity.reference import Row
from tests.parity.steps_side import one_step, topology_of


class Listening(Pretrain):
    """The method as it is, and the logits of the last batch: the head is asked without labels beside its loss."""

    logits: Tensor

    def loss(self, model: nn.Module, batch: MicroBatch, scale: float) -> Tensor:
        layer: Any = head(model)
        plain = layer.forward

        def listen(hidden: Tensor, **arguments: Any) -> Tensor:
            self.logits = plain(hidden).detach()
            return plain(hidden, **arguments)

        layer.forward = listen
        try:
            return super().loss(model, batch, scale)
        finally:
            layer.forward = plain


@dataclass
class Seen:
    """logits [rows, seq, vocab] of data-parallel rank 0's batch, loss its sum over all targets."""

    logits: Tensor
    loss: float


def look(engine: Engine, topology: Topology, rows: list[Row]) -> Seen:
    """The same rows on every data-parallel rank."""
    method, batch = Listening(MethodConfig()), pack(rows)
    loss = engine.evaluate(method, shard_batch(batch, topology.sp, topology.sp_rank)).item()
    slices = topology.gather_objects((method.logits.cpu(), loss))[: topology.sp]
    logits = torch.cat([part for part, _ in slices], dim=1)[:, : batch.input_ids.shape[1]]
    return Seen(logits, sum(loss for _, loss in slices))


def look_at(cfg: RunConfig, batches: list[list[Row]]) -> list[Seen]:
    """The logits of each batch, before any training."""
    topology = topology_of(cfg.parallel.sp)
    engine, _ = assemble_both(cfg, topology)
    found = [look(engine, topology, rows) for rows in batches]
    engine.close()
    return found


def train_and_export(
    cfg: RunConfig, steps: list[list[Row]], folder: str, rows: list[Row], dtype: torch.dtype = torch.float32
) -> tuple[Seen, dict[str, Tensor]]:
    """Train, look at `rows`, export as `train.run.finish` does; also this rank's buffers behind the training."""
    topology = topology_of(cfg.parallel.sp)
    engine, built = assemble_both(cfg, topology, dtype)
    for step in steps:
        one_step(engine, topology, step, cfg.optim.lr)
    seen = look(engine, topology, rows)
    check_positions(built)
    export_hf(built, engine.named_full_parameters(), Path(folder), dtype, None, topology.is_main)
    topology.barrier()
    buffers = {name: buffer.cpu() for name, buffer in built.model.named_buffers()}
    engine.close()
    return seen, buffers
