"""The course of the learning rate, as a plain function of the optimizer step; transformers' own curves.

Without a state there is nothing to save or to get out of step: a resumed run asks for the same steps again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from stack.config.derive import decay_steps
from stack.config.schema import ScheduleConfig


def lr_factor(schedule: ScheduleConfig, total_steps: int) -> Callable[[int], float]:
    """Function from optimizer step k, counted from 0, to the share of the peak rate that step k is taken
    with.

    total_steps: of the whole run; `checks.schedule_faults` says whether warmup and decay fit into it. With
    warmup, step 0 is taken with rate 0 (`wsd`: with `min_lr_ratio`), as in every run of transformers.
    """
    details: dict[str, Any] | None = None
    name = {"cosine": "cosine_with_min_lr", "wsd": "warmup_stable_decay", "constant": "constant_with_warmup"}
    if schedule.name == "cosine":
        details = {"min_lr_rate": schedule.min_lr_ratio}
    elif schedule.name == "wsd":
        decay = decay_steps(schedule, total_steps)
        details = {"num_decay_steps": decay, "decay_type": "linear", "min_lr_ratio": schedule.min_lr_ratio}
    # The curve hangs on an optimizer there; this one exists for nothing else.
    holder = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    curve = get_scheduler(
        name.get(schedule.name, schedule.name),
        holder,
        num_warmup_steps=schedule.warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=details,
    )
    assert isinstance(curve, LambdaLR)
    factor = curve.lr_lambdas[0]
    return lambda step: float(factor(step))
