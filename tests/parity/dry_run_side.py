"""What a process runs to count a step: on real ranks, or alone for all of them."""

from __future__ import annotations

import os

from stack.bench.dry_run import DryRun, count_steps, dry_run
from stack.config.compose import compose_config
from stack.dist.env import read_rank_env
from stack.dist.topology import init_topology


def counted_for_real(cases: dict[str, list[str]]) -> dict[str, DryRun]:
    """Two ranks; the steps run."""
    topology = init_topology(read_rank_env(dict(os.environ)), 2, "cpu", 120)
    return {name: count_steps(compose_config(given, world=2), topology) for name, given in cases.items()}


def counted_dry(cases: dict[str, list[str]], world: int, gpu_attention: bool) -> dict[str, DryRun]:
    """Alone; nothing runs."""
    return {
        name: dry_run(compose_config(given, world=world), world, gpu_attention)
        for name, given in cases.items()
    }
