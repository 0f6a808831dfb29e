"""The course of the learning rate: transformers' own curves, asked for any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from stack.config.schema import ScheduleConfig
from stack.engine.schedule import lr_factor

STEPS, WARMUP = 12, 2


def _holder() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


CURVES: dict[str, tuple[ScheduleConfig, Any]] = {
    "cosine": (
        ScheduleConfig(name="cosine", warmup_steps=WARMUP),
        lambda held: transformers.get_cosine_schedule_with_warmup(held, WARMUP, STEPS),
    ),
    "cosine, lowest rate": (
        ScheduleConfig(name="cosine", warmup_steps=WARMUP, min_lr_ratio=0.1),
        lambda held: transformers.optimization.get_cosine_with_min_lr_schedule_with_warmup(
            held, WARMUP, STEPS, min_lr_rate=0.1
        ),
    ),
    "linear": (
        ScheduleConfig(name="linear", warmup_steps=WARMUP),
        lambda held: transformers.get_linear_schedule_with_warmup(held, WARMUP, STEPS),
    ),
    "constant": (
        ScheduleConfig(name="constant", warmup_steps=WARMUP),
        lambda held: transformers.get_constant_schedule_with_warmup(held, WARMUP),
    ),
    "wsd": (
        ScheduleConfig(name="wsd", warmup_steps=WARMUP, decay_steps=4, min_lr_ratio=0.2),
        lambda held: transformers.optimization.get_wsd_schedule(
            held, WARMUP, 4, num_training_steps=STEPS, decay_type="linear", min_lr_ratio=0.2
        ),
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_curve_is_that_of_transformers(name: str) -> None:
    schedule, make = CURVES[name]
    holder = _holder()
    reference = make(holder)
    expected = []
    for _ in range(STEPS):
        expected.append(holder.param_groups[0]["lr"])
        holder.step()
        reference.step()
    factor = lr_factor(schedule, STEPS)
    assert [factor(step) for step in range(STEPS)] == expected
    assert [factor(step) for step in reversed(range(STEPS))] == expected[::-1]  # no state


def test_shapes() -> None:
    cosine = lr_factor(ScheduleConfig(name="cosine", warmup_steps=2), 12)
    assert (cosine(0), cosine(1), cosine(2)) == (0.0, 0.5, 1.0)
    assert cosine(7) == pytest.approx(0.5)
    wsd = lr_factor(ScheduleConfig(name="wsd"), 20)  # decays over a tenth
    assert [wsd(step) for step in (0, 17, 18, 19)] == [1.0, 1.0, 1.0, 0.5]
    assert lr_factor(ScheduleConfig(name="constant"), 3)(2) == 1.0
