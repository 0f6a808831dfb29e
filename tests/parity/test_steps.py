"""Single steps on two ranks: what is skipped, clipped, frozen, empty or uneven, at every ZeRO stage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from stack.errors import ModelError
from tests.parity import reference, steps_side
from tests.parity.cases import ParityCase
from tests.parity.rank_side import config_of
from tests.parity.reference import Row, make_steps
from tests.ranks import Case, run_cases, run_ranks

STAGES = (0, 1, 2, 3)


def case(stage: int, levers: str = "all", layout: str = "sp2", tied: bool = False) -> ParityCase:
    return ParityCase(layout, stage, 1, levers, tied, "packed")


def empty(rows: list[Row]) -> list[Row]:
    return [replace(row, wanted=[[False] * len(wanted) for wanted in row.wanted]) for row in rows]


@pytest.fixture(scope="module")
def steps(folders):
    """All runs of this file on one start of two ranks."""
    text = make_steps("packed")
    cfgs = {stage: config_of(case(stage), folders[False]) for stage in STAGES}
    runs: dict[str, tuple] = {}
    for stage, cfg in cfgs.items():
        clipped = replace(cfg, optim=replace(cfg.optim, clip=0.1))
        runs[f"clip {stage}"] = (clipped, text[:1], [0.5])
        runs[f"nan {stage}"] = (cfg, text[:3], [0.1] * 3, {1: 1})
        runs[f"without {stage}"] = (cfg, [text[0], text[2]], [0.1] * 2)
        runs[f"empty {stage}"] = (cfg, [empty(text[0]), text[1]], [0.1] * 2)
        uneven = replace(cfg, parallel=replace(cfg.parallel, sp=1))
        runs[f"uneven {stage}"] = (uneven, [text[0], text[1][:3], text[2]], [0.1] * 3)
    for levers in ("checkpoint", "offload", "all"):
        cfg = config_of(case(3, levers), folders[False])
        frozen = replace(cfg, model=replace(cfg.model, freeze=["*norm*", "*embed*"]))
        runs[f"frozen {levers}"] = (frozen, text[:3], [0.1, 0.1, 1024.0])
    return run_ranks(steps_side.many, 2, runs, init=False)[0]


def moved(before, after) -> float:
    return math.sqrt(
        sum((after[name].double() - before[name].double()).square().sum().item() for name in before)
    )


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_bounds_the_update_and_the_norm_shown_is_before_it(steps, stage):
    start, step = steps[f"clip {stage}"]
    assert step.result.clipped and step.result.grad_norm > 0.1
    assert moved(start.weights, step.weights) == pytest.approx(0.5 * 0.1, rel=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_off_means_off(steps, stage):
    start, step = steps[f"without {stage}"][:2]
    assert not step.result.clipped
    assert moved(start.weights, step.weights) == pytest.approx(0.1 * step.result.grad_norm, rel=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_nan_on_one_rank_skips_the_step_on_all(steps, stage):
    _, first, bad, last = steps[f"nan {stage}"]
    assert math.isnan(bad.loss) and bad.result.skipped == "nonfinite"
    assert all(torch.equal(bad.weights[name], first.weights[name]) for name in first.weights)
    # Nothing of the bad step is left in the next one.
    _, _, clean = steps[f"without {stage}"]
    assert last.result.skipped is None and last.loss == clean.loss
    assert all(torch.equal(last.weights[name], clean.weights[name]) for name in clean.weights)


@pytest.mark.parametrize("stage", STAGES)
def test_step_without_any_target_changes_nothing(steps, stage):
    start, nothing, after = steps[f"empty {stage}"]
    assert nothing.loss == 0.0 and nothing.result.grad_norm == 0.0 and nothing.result.skipped is None
    assert all(torch.equal(nothing.weights[name], start.weights[name]) for name in start.weights)
    assert math.isfinite(after.loss) and after.result.grad_norm > 0


@pytest.mark.parametrize("stage", STAGES)
def test_steps_of_different_size_with_an_empty_micro_batch(steps, stage, folders):
    text = make_steps("packed")
    want = reference.train(reference.load(folders[False]), [text[0], text[1][:3], text[2]], [0.1] * 3)
    got = steps[f"uneven {stage}"][1:]
    assert [step.loss for step in got] == pytest.approx(want.losses, rel=1e-6)
    assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=1e-5)


@pytest.mark.parametrize("levers", ["checkpoint", "offload", "all"])
def test_frozen_parameters_stay_and_the_others_learn_exactly(steps, levers, folders):
    model = reference.load(folders[False])
    for name, param in model.named_parameters():
        if "norm" in name or "embed" in name:
            param.requires_grad_(False)
    want = reference.train(model, make_steps("packed")[:3], [0.1, 0.1, 1024.0])
    start, *got = steps[f"frozen {levers}"]
    assert [step.loss for step in got] == pytest.approx(want.losses, rel=1e-6)
    before, after = got[-2].weights, got[-1].weights
    for name, weight in start.weights.items():
        if name not in want.grads:
            assert torch.equal(after[name], weight), name
            continue
        grad = (before[name] - after[name]).double() / 1024.0
        error = (grad - want.grads[name]).norm() / want.grads[name].norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def test_a_layer_applied_twice(folders):
    """At every stage with what it allows: gradients of both uses add up, and are reduced once."""
    text, lrs = make_steps("packed")[:2], [0.1, 1024.0]
    model = reference.load(folders[False])
    layers = cast(Any, model).model.layers
    layers[1] = layers[0]
    want = reference.train(model, text, lrs)
    cases = {
        f"{stage} {layout} {levers}": Case(
            steps_side.shared_layer, (case(stage, levers, layout), folders[False], text, lrs)
        )
        for stage, levers in ((0, "all"), (2, "all"), (3, "offload"), (3, "all"))
        for layout in ("sp2", "dp2")
    }
    for name, outcome in run_cases(2, cases, init=False).items():
        if name.startswith("3") and name.endswith("all"):
            with pytest.raises(ModelError, match=r"memory\.tiled_mlp=false"):
                outcome.get()
            continue
        got = outcome.get()[0]
        assert [step.loss for step in got] == pytest.approx(want.losses, rel=1e-6), name
        assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=1e-5), name


@pytest.mark.parametrize("sp", [1, 2])
def test_evaluation_is_the_same_at_any_split_and_leaves_training_alone(folders, sp):
    generator = torch.Generator().manual_seed(3)
    held_out = [
        Row([torch.randint(0, 64, (n,), generator=generator).tolist()], [[True] * n]) for n in (7, 16, 33)
    ]
    cfg = config_of(case(3, "all", "sp2" if sp == 2 else "dp2"), folders[False])
    text = make_steps("packed")[:3]
    found = run_ranks(steps_side.with_evaluation, 2, cfg, text, 0.1, held_out, init=False)[0]
    (losses, weights, _), (same, also, evals) = found["without"], found["with"]
    assert losses == same
    assert all(torch.equal(weights[name], also[name]) for name in weights)
    want = reference.train(reference.load(folders[False]), [held_out], [0.1]).losses[0]
    assert evals[0] == pytest.approx(want, rel=1e-6)
