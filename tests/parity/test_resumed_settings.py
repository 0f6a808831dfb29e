"""A resumed run takes its moments from the checkpoint and its optimizer settings from the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity.cases import ParityCase
from tests.parity.rank_side import assemble, config_of, save_now, weights_of
from tests.parity.reference import make_steps
from tests.parity.steps_side import one_step, topology_of
from tests.ranks import Case, run_cases

STAGES = (0, 1, 2, 3)


def next_step(folder: str, saved: str, stage: int, weight_decay: float) -> dict[str, torch.Tensor]:
    """Weights one step behind a checkpoint of a run with weight decay 0.1."""
    topology, text = topology_of(1), make_steps("one document")
    cfg = config_of(ParityCase("1", stage, 1, "none", False, ""), folder)
    cfg = replace(cfg, optim=replace(cfg.optim, name="adamw", lr=0.3, weight_decay=0.1))
    engine = assemble(cfg, topology)
    one_step(engine, topology, text[0], 0.1)
    save_now(engine, Path(saved), "first", {"step": 1})
    engine.close()
    engine = assemble(replace(cfg, optim=replace(cfg.optim, weight_decay=weight_decay)), topology)
    assert engine.load(Path(saved), "first")["step"] == 1
    # Not the peak of the settings: what is saved again before another step is what was saved.
    assert {group["lr"] for group in engine._engine.optimizer.param_groups} == {0.1}
    one_step(engine, topology, text[1], 0.1)
    weights = weights_of(engine)
    engine.close()
    return weights


@pytest.fixture(scope="module")
def outcomes(folders, tmp_path_factory):
    cases = {
        f"{stage} {decay}": Case(
            next_step, (folders[False], str(tmp_path_factory.mktemp("saved")), stage, decay)
        )
        for stage in STAGES
        for decay in (0.1, 2.0)
    }
    return run_cases(1, cases, init=False)


@pytest.mark.parametrize("stage", STAGES)
def test_a_changed_weight_decay_takes_effect(outcomes, stage):
    same, changed = (outcomes[f"{stage} {decay}"].get()[0] for decay in (0.1, 2.0))
    for name, weight in same.items():
        if weight.ndim < 2:
            assert torch.equal(weight, changed[name]), f"{name}: norms do not decay"
            continue
        # Decoupled decay: w - lr * wd * w_before, the rest of the step alike. So the gap is lr * 1.9 of the weight before.
        before = (weight - changed[name]) / (0.1 * 1.9)
        assert before.norm() > 0.5 * weight.norm(), name
