"""What each rank runs to compare ways of keeping activations, and fused norms: lean layers under ZeRO-3 in bf16 or fp32."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stack.config.schema import MemoryConfig, MethodConfig
from stack.dist.env import read_rank_env
from stack.dist.topology import init_topology
from stack.methods.pretrain import Pretrain
from stack.models.build import DTYPES
from stack.ops.spill_file import SpillFile
from stack.parallel.fused import rms_norms
from stack.parallel.shard_batch import shard_batch
from tests.parity.cases import ParityCase
from tests.parity.rank_side import assemble_both, config_of, pack, weights_of
from tests.parity.reference import Row

STEPS = ((16, 6), (10,), (2, 16))
"""Lengths of the micro-batches of each step."""


@dataclass
class Kept:
    """What one rank saw; weights on rank 0 only."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    own_norms: int
    """Norms with a forward of their own."""
    spilled: int
    """Layers written to a file."""


def run_all(folder: str, memories: dict[str, MemoryConfig], precision: str) -> dict[str, Kept]:
    """Three steps with each of `memories`."""
    topology = init_topology(read_rank_env(dict(os.environ)), 2, "cpu", 120)
    case = ParityCase("sp2", 3, 1, "lean", False, "one document")
    outcomes, written, plain = {}, [], SpillFile.write
    setattr(SpillFile, "write", lambda *arguments: (written.append(1), plain(*arguments))[1])  # noqa: B010
    for name, memory in memories.items():
        cfg = replace(config_of(case, folder, precision), memory=memory)
        engine, built = assemble_both(cfg, topology, DTYPES[precision])
        method, generator, losses, norms = Pretrain(MethodConfig()), torch.Generator().manual_seed(3), [], []
        for lengths in STEPS:
            for length in lengths:
                tokens = torch.randint(0, 64, (2, length), generator=generator).tolist()
                batch = pack([Row([row], [[True] * length]) for row in tokens])
                share = shard_batch(batch, 2, topology.sp_rank)
                losses.append(engine.forward_backward(method, share, 100).item())
            norms.append(engine.step(0.5).grad_norm)
        own = sum("forward" in vars(norm) for norm in rms_norms(built.model))
        outcomes[name] = Kept(losses, norms, weights_of(engine), own, len(written))
        written.clear()
        engine.close()
    return outcomes
