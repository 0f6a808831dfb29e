"""What each rank runs: the real model building, parallelism and engine, on the reference's rows."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stack.config.schema import (
    DataConfig,
    EngineConfig,
    MemoryConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from stack.data.batch import IGNORE, MicroBatch
from stack.dist.env import read_rank_env
from stack.dist.topology import Topology, init_topology
from stack.engine.build import build_engine
from stack.engine.ds_config import build_ds_config
from stack.engine.handle import Engine
from stack.engine.zero_init import join_deepspeed, zero3_partitioner
from stack.methods.pretrain import Pretrain
from stack.models.build import BuiltModel, build_model
from stack.parallel.apply import apply_parallelism
from stack.parallel.shard_batch import shard_batch
from tests.parity.cases import LAYOUTS, ParityCase
from tests.parity.reference import LRS, SEQ, Row, make_steps

LEVERS = {
    "none": MemoryConfig(),
    "tiled_loss": MemoryConfig(tiled_loss=True, loss_tile=4),
    "tiled_mlp": MemoryConfig(tiled_mlp=True, mlp_tile=3),
    "checkpoint": MemoryConfig(checkpointing="full"),
    "offload": MemoryConfig(checkpointing="full", offload=True),
    "lean": MemoryConfig(
        lean=True, mlp_tile=3, tiled_loss=True, loss_tile=4, attention_heads=1, offload=True
    ),
    "all": MemoryConfig(
        tiled_loss=True, loss_tile=4, tiled_mlp=True, mlp_tile=3, checkpointing="full", offload=True
    ),
}


@dataclass
class Curve:
    """What one rank saw; weights before the last step and the last step's gradients, on rank 0 only."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def config_of(case: ParityCase, folder: str, precision: str = "fp32") -> RunConfig:
    sp, dp = LAYOUTS[case.layout]
    return RunConfig(
        model=ModelConfig(path=folder),
        data=DataConfig(seq_len=SEQ, micro_batch=6 // (dp * case.accumulation)),
        parallel=ParallelConfig(sp=sp),
        memory=LEVERS[case.levers],
        engine=EngineConfig(stage=case.stage, precision=precision, accumulation=case.accumulation),  # type: ignore[arg-type]
        optim=OptimConfig(name="sgd", lr=LRS[0], clip=0.0, weight_decay=0.0),
    )


def assemble(cfg: RunConfig, topology: Topology, dtype: torch.dtype = torch.float32) -> Engine:
    return assemble_both(cfg, topology, dtype)[0]


def assemble_both(
    cfg: RunConfig, topology: Topology, dtype: torch.dtype = torch.float32
) -> tuple[Engine, BuiltModel]:
    join_deepspeed(topology)
    ds_config = build_ds_config(cfg, topology.world)
    stage = cfg.engine.stage
    partition = zero3_partitioner(ds_config, dtype) if stage == 3 else None
    built = build_model(cfg.model, cfg.data.seq_len, dtype, cfg.seed, partition, topology.is_main)
    apply_parallelism(built.model, built.spec, cfg.memory, cfg.model.attention, stage, topology)
    return build_engine(built.model, cfg.optim, topology, ds_config), built


def pack(rows: list[Row]) -> MicroBatch:
    """The reference's rows as one micro-batch, built by hand."""
    ids, labels, positions, bounds = [], [], [], [0]
    for row in rows:
        ids.append([token for document in row.documents for token in document])
        row_labels = []
        for document, wanted in zip(row.documents, row.wanted, strict=True):
            shifted = zip(document[1:], wanted[1:], strict=True)
            row_labels += [token if want else IGNORE for token, want in shifted] + [IGNORE]
            bounds.append(bounds[-1] + len(document))
        labels.append(row_labels)
        positions.append([place for document in row.documents for place in range(len(document))])
    return MicroBatch(
        torch.tensor(ids),
        torch.tensor(labels),
        torch.tensor(positions),
        torch.tensor(bounds, dtype=torch.int32),
    )


def train(case: ParityCase, folder: str, topology: Topology, device: str = "cpu") -> Curve:
    engine = assemble(config_of(case, folder), topology)
    method, curve = Pretrain(MethodConfig()), Curve([], [], {}, {})
    size = 6 // (topology.dp * case.accumulation)
    for lr, rows in zip(LRS, make_steps(case.text), strict=True):
        mine = rows[topology.dp_rank * size * case.accumulation :][: size * case.accumulation]
        batches = [
            shard_batch(pack(mine[start : start + size]), topology.sp, topology.sp_rank)
            for start in range(0, len(mine), size)
        ]
        num_targets = topology.sum(sum(batch.num_targets for batch in batches))
        loss = sum(engine.forward_backward(method, batch, num_targets).item() for batch in batches)
        curve.losses.append(topology.sum(loss) / num_targets)
        if lr == LRS[-1]:
            curve.weights = weights_of(engine)
        curve.norms.append(engine.step(lr).grad_norm)
    # Read off the update, so that they are what the optimizer really applied, at every stage.
    curve.grads = {
        name: (curve.weights[name] - after) / LRS[-1] for name, after in weights_of(engine).items()
    }
    engine.close()
    return curve


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: value for name, value in engine.named_full_parameters() if value is not None}


def save_now(
    engine: Engine, folder: Path, tag: str, client_state: dict[str, Any], to_host: bool = False
) -> None:
    """Every rank's files below `folder/tag`, without what makes a checkpoint of them. Collective."""
    (folder / tag).mkdir(parents=True, exist_ok=True)
    for name, content in engine.capture(folder, tag, client_state, to_host).items():
        torch.save(content, folder / tag / name)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def run_table(
    cases: list[ParityCase], folders: dict[bool, str], device: str = "cpu"
) -> dict[str, Curve | str]:
    """All cases of one world size on one start of the ranks; a failed case is told by its traceback."""
    outcomes: dict[str, Curve | str] = {}
    for case in cases:
        topology = init_topology(read_rank_env(dict(os.environ)), LAYOUTS[case.layout][0], device, 120)
        try:
            outcomes[case.name] = train(case, folders[case.tied], topology, device)
        except Exception:  # noqa: BLE001  a failed case is a result, reported by the test of that case with this text
            outcomes[case.name] = traceback.format_exc()
    return outcomes
