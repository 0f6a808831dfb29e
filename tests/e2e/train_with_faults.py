"""launch/train.py with faults built in: `FAULTS=nan:2,die:5` makes the last rank's loss NaN in step 2 and kills that rank
when step 5 begins. Steps count from 1."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

import torch

os.environ["DS_ACCELERATOR"] = "cpu"  # before the imports below, as train.run does
from stack.engine.handle import Engine
from stack.train import loop, run

FAULTS = {
    kind: int(step)
    for kind, _, step in (part.partition(":") for part in os.environ["FAULTS"].split(",") if part)
}


class NanMethod:
    """The method given, with a loss that is no number."""

    def __init__(self, method: Any):
        self._method = method

    def loss(self, *args: Any) -> torch.Tensor:
        return self._method.loss(*args) * float("nan")


def with_faults(train_step: Any) -> Any:
    def step(job: loop.Job, state: Any) -> Any:
        last = job.topology.rank == job.topology.world - 1
        if last and FAULTS.get("die") == state.step + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        plain = Engine.forward_backward
        if last and FAULTS.get("nan") == state.step + 1:
            Engine.forward_backward = lambda engine, method, *rest: plain(engine, NanMethod(method), *rest)  # type: ignore[method-assign]
        try:
            return train_step(job, state)
        finally:
            Engine.forward_backward = plain  # type: ignore[method-assign]

    return step


if __name__ == "__main__":
    loop.train_step = with_faults(loop.train_step)
    assert run.train is loop.train
    runpy.run_path(str(Path(__file__).parents[2] / "launch" / "train.py"), run_name="__main__")
