"""What a process runs to count a step: on real ranks, or alone for all of them."""

from __future__ import annotations

import os

from stack.bench.one_process import count_alone
from stack.bench.step_count import StepCount, count_steps
from stack.config.compose import compose_config
from stack.dist.env import read_rank_env
from stack.dist.topology import init_topology


def counted_for_real(given: list[str]) -> StepCount:
    """Two ranks; the steps run."""
    cfg = compose_config(given, world=2)
    topology = init_topology(read_rank_env(dict(os.environ)), cfg.parallel.sp, "cpu", 120)
    return count_steps(cfg, topology)


def counted_alone(cases: dict[str, list[str]], world: int) -> dict[str, StepCount]:
    """Nothing runs. Two processes: the first counts as on CPU ranks, the second on the virtual device."""
    virtual = os.environ["RANK"] == "1"
    return {
        name: count_alone(compose_config(given, world=world), world, "cpu", virtual)
        for name, given in cases.items()
    }
