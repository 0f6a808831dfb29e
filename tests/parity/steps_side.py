"""What each rank runs for the tests of single steps: clipping, non-finite losses, empty and uneven steps, evaluation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stack.config.schema import MethodConfig, RunConfig
from stack.data.batch import IGNORE
from stack.dist.env import read_rank_env
from stack.dist.topology import Topology, init_topology
from stack.engine.handle import Engine, StepResult
from stack.methods.pretrain import Pretrain
from stack.parallel.shard_batch import shard_batch
from tests.parity.cases import ParityCase
from tests.parity.rank_side import assemble, config_of, pack, weights_of
from tests.parity.reference import Row


@dataclass
class Step:
    """One optimizer step as rank 0 saw it."""

    loss: float
    result: StepResult
    weights: dict[str, Tensor]


class Poisoned(Pretrain):
    """Gives a NaN loss on one rank, with finite gradients: the worst kind."""

    rank = -1

    def loss(self, model, batch, scale):
        loss = super().loss(model, batch, scale)
        return loss + math.nan if self.rank >= 0 else loss


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def topology_of(sp: int, device: str = "cpu") -> Topology:
    return init_topology(read_rank_env(dict(os.environ)), sp, device, 120)


def one_step(
    engine: Engine,
    topology: Topology,
    rows: list[Row],
    lr: float,
    size: int = 1,
    method: Pretrain | None = None,
) -> Step:
    """Rows are dealt to the data-parallel ranks in turn, `size` to a micro-batch; missing ones become empty batches."""
    method = method or Pretrain(MethodConfig())
    mine = rows[topology.dp_rank :: topology.dp]
    count = -(-len(rows) // (topology.dp * size))
    batches = [pack(mine[start : start + size]) for start in range(0, len(mine), size)]
    empty = [replace(batch, labels=torch.full_like(batch.labels, IGNORE)) for batch in batches[:1]]
    batches = [
        shard_batch(b, topology.sp, topology.sp_rank) for b in batches + empty * (count - len(batches))
    ]
    num_targets = topology.sum(sum(batch.num_targets for batch in batches))
    loss = sum(engine.forward_backward(method, batch, num_targets).item() for batch in batches)
    result = engine.step(lr)
    return Step(topology.sum(loss) / max(num_targets, 1), result, weights_of(engine))


def run_steps(
    cfg: RunConfig,
    steps: list[list[Row]],
    lrs: list[float],
    poison: dict[int, int] | None = None,
    size: int = 1,
    device: str = "cpu",
) -> list[Step]:
    """Start from the weights of the config's folder. poison: step -> rank whose loss is NaN. size: rows in a
    micro-batch."""
    topology = topology_of(cfg.parallel.sp, device)
    engine = assemble(cfg, topology, DTYPES[cfg.engine.precision])
    seen = [Step(0.0, StepResult(0.0, False, None, None), weights_of(engine))]
    for index, (rows, lr) in enumerate(zip(steps, lrs, strict=True)):
        method = Poisoned(MethodConfig())
        method.rank = 0 if (poison or {}).get(index) == topology.rank else -1
        seen.append(one_step(engine, topology, rows, lr, size, method))
    engine.close()
    return seen


def many(runs: dict[str, tuple]) -> dict[str, list[Step]]:
    return {name: run_steps(*run) for name, run in runs.items()}


def with_evaluation(
    cfg: RunConfig, steps: list[list[Row]], lr: float, held_out: list[Row]
) -> dict[str, object]:
    """Train twice from the same weights, once with evaluations before and between the steps."""
    topology = topology_of(cfg.parallel.sp)
    method, found = Pretrain(MethodConfig()), {}
    for evaluating in (False, True):
        engine = assemble(cfg, topology, DTYPES[cfg.engine.precision])
        losses, evals = [], []
        for rows in steps:
            if evaluating:
                evals.append(_evaluate(engine, topology, method, held_out))
            losses.append(one_step(engine, topology, rows, lr).loss)
        found["with" if evaluating else "without"] = (losses, weights_of(engine), evals)
        engine.close()
    return found


def _evaluate(engine: Engine, topology: Topology, method: Pretrain, rows: list[Row]) -> float:
    """Rows of different lengths, one a batch; every rank of a row's group takes part."""
    total, targets = 0.0, 0
    for row in rows:
        batch = shard_batch(pack([row]), topology.sp, topology.sp_rank)
        share = 1.0 / topology.dp  # every data-parallel rank evaluates the same rows here
        total += engine.evaluate(method, batch).item() * share
        targets += batch.num_targets
    return topology.sum(total) / (topology.sum(targets) / topology.dp)


def shared_layer(case: ParityCase, folder: str, steps: list[list[Row]], lrs: list[float]) -> list[Step]:
    """A model whose second block is its first one, applied again."""
    import tests.parity.rank_side as rank_side

    topology = topology_of(1 if case.layout == "dp2" else 2)
    real: Callable = rank_side.build_model

    def build(*args, **kwargs):
        built = real(*args, **kwargs)
        built.model.model.layers[1] = built.model.model.layers[0]
        return built

    rank_side.build_model = build
    try:
        engine = assemble(config_of(case, folder), topology)
    finally:
        rank_side.build_model = real
    seen = [one_step(engine, topology, rows, lr) for rows, lr in zip(steps, lrs, strict=True)]
    engine.close()
    return seen
