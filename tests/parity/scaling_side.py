"""fp16 with dynamic loss scaling: what each rank runs, and what must come of it, on CPU ranks and on GPUs (tests/gpu)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stack.config.schema import RunConfig
from tests.parity import reference
from tests.parity.cases import ParityCase
from tests.parity.rank_side import config_of
from tests.parity.reference import Row, make_steps
from tests.parity.steps_side import Step, run_steps

POWER = 26
"""The scale starts at 2^26, where gradients of these models overflow; about 2^19 is the first at which they do not."""

STEPS: list[list[Row]] = [make_steps("packed")[step % 5] for step in range(13)]
LR = 0.1


def config(case: ParityCase, folder: str) -> RunConfig:
    cfg = config_of(case, folder, "fp16")
    # hysteresis 1: the scale halves at the first overflow, not at the second.
    overrides = {"fp16": {"initial_scale_power": POWER, "hysteresis": 1}}
    return replace(cfg, engine=replace(cfg.engine, overrides=overrides))


def run(cfgs: dict[str, RunConfig], device: str = "cpu") -> dict[str, list[Step]]:
    if device == "cpu":
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed refuses fp16 on the CPU, where it would be slow; torch computes it all the same.
        type(get_accelerator()).is_fp16_supported = lambda accelerator: True  # type: ignore[method-assign]
    lrs = [LR] * len(STEPS)
    return {name: run_steps(cfg, STEPS, lrs, device=device) for name, cfg in cfgs.items()}


def assert_scaled_and_learned(start: Step, steps: list[Step], folder: str) -> None:
    """Too large a scale skips steps and leaves the weights alone; the other steps follow the plain loop over their rows."""
    skipped = [step.result.skipped == "loss-scale" for step in steps]
    assert skipped[0] and not any(skipped[-3:])
    assert all(step.result.skipped in (None, "loss-scale") for step in steps)
    assert [step.result.loss_scale for step in steps] == [
        2.0 ** (POWER - sum(skipped[:index])) for index in range(len(steps))
    ]
    for before, step in zip([start, *steps], steps, strict=False):
        same = [torch.equal(step.weights[name], weight) for name, weight in before.weights.items()]
        assert all(same) if step.result.skipped else not any(same[:1]), (
            "the embedding moves in every step taken"
        )
    learned = [step for step in steps if not step.result.skipped]
    rows = [rows for rows, skip in zip(STEPS, skipped, strict=True) if not skip]
    want = reference.train(reference.load(folder), rows, [LR] * len(rows))
    assert [step.loss for step in learned] == pytest.approx(want.losses, rel=3e-3)
    assert [step.result.grad_norm for step in learned] == pytest.approx(want.norms, rel=1e-2)
