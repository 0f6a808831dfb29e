"""Adam's first step is its first: DeepSpeed's optimizer for 16 bit without ZeRO takes one beforehand, which has to be undone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity.cases import ParityCase
from tests.parity.rank_side import assemble, config_of, weights_of
from tests.parity.reference import make_steps
from tests.parity.steps_side import DTYPES, one_step, topology_of
from tests.ranks import Case, run_cases

LR = 0.125
CASES = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]


def first_step(folder: str, stage: int, precision: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Weights as built and after one step. Decay is strong, so that a step without gradients would show."""
    topology = topology_of(1)
    cfg = config_of(ParityCase("1", stage, 1, "none", False, ""), folder, precision)
    cfg = replace(cfg, optim=replace(cfg.optim, name="adamw", lr=LR, weight_decay=2.0))
    engine = assemble(cfg, topology, DTYPES[precision])
    before = weights_of(engine)
    one_step(engine, topology, make_steps("one document")[0], LR)
    after = weights_of(engine)
    engine.close()
    return before, after


@pytest.fixture(scope="module")
def outcomes(folders):
    cases = {f"{case}": Case(first_step, (folders[False], *case)) for case in CASES}
    return run_cases(1, cases, init=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"zero{case[0]} {case[1]}")
def test_first_step_moves_by_the_learning_rate(outcomes, case):
    before, after = outcomes[f"{case}"].get()[0]
    for name, weight in before.items():
        decayed = weight.float() * (1 - LR * 2.0 if weight.ndim == 2 else 1.0)
        # m / sqrt(v) of one gradient is its sign; taken for a second step it would be 0.75 of that.
        moved = (after[name].float() - decayed).abs().median().item()
        assert moved == pytest.approx(LR, rel=0.03), name
