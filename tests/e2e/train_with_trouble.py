"""launch/train.py with troubles built in, at exact moments: `TROUBLE="TERM 1 step 3, HANG 0 evaluation 5"`.

Each is: what, on which rank, where, in which step (counted from 1). What: a signal's name, which the rank sends itself;
TWICE (two SIGTERMs, the second long after the first); HANG; HOLD (the same with Python's lock held); OOM; NAN and SPIKE
(of the loss, as often as the step is taken). Where: start, step, evaluation, save, end (waiting for the save under way).
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import torch

os.environ["DS_ACCELERATOR"] = "cpu"  # before the imports below, as train.run does
from stack.checkpoint.save import Saver
from stack.dist import hub, watch
from stack.engine import build
from stack.engine.handle import Engine
from stack.train import loop

RANK = int(os.environ.get("RANK", "0"))
TROUBLES = [tuple(part.split()) for part in os.environ.get("TROUBLE", "").split(",") if part.strip()]
FACTORS = {"NAN": float("nan"), "SPIKE": 100.0}
now = {"step": 0}


def due(where: str, kinds: Any) -> list[str]:
    here = (str(RANK), where, str(now["step"]))
    return [what for what, *moment in TROUBLES if tuple(moment) == here and kinds(what)]


def suffer(where: str) -> None:
    """What happens here, once."""
    for what in due(where, lambda what: what not in FACTORS):
        TROUBLES.remove((what, str(RANK), where, str(now["step"])))
        print(f"rank {RANK}: {what} in the {where} of step {now['step']}", flush=True)
        if what == "HANG":
            time.sleep(600)
        elif what == "HOLD":
            ctypes.PyDLL(None).sleep(600)
        elif what == "OOM":
            torch.empty(2**60, dtype=torch.uint8)
        elif what == "TWICE":
            for pause in (3.0, 600.0):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(pause)
        else:
            os.kill(os.getpid(), getattr(signal, f"SIG{what}"))


class Spoiled:
    """A method whose loss is that of `method` times a factor."""

    def __init__(self, method: Any, factor: float):
        self.method, self.factor = method, factor

    def loss(self, *args: Any) -> torch.Tensor:
        return self.method.loss(*args) * self.factor


def with_trouble(where: str, function: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        suffer(where)
        return function(*args, **kwargs)

    return wrapped


def watched_step(job: loop.Job, state: Any) -> Any:
    now["step"] = state.step + 1
    method = job.method
    for what in due("step", lambda what: what in FACTORS):
        job.method = Spoiled(method, FACTORS[what])
        job.method.count_targets = method.count_targets  # type: ignore[attr-defined]
    try:
        return plain_step(job, state)
    finally:
        job.method = method


if __name__ == "__main__":
    if any(what == "HOLD" for what, *_ in TROUBLES):
        hub.WHERE_S, watch.NATIVE_S = 1.0, 5.0
    plain_step, loop.train_step = loop.train_step, watched_step
    Engine.forward_backward = with_trouble("step", Engine.forward_backward)  # type: ignore[method-assign]
    Engine.evaluate = with_trouble("evaluation", Engine.evaluate)  # type: ignore[method-assign]
    Engine.capture = with_trouble("save", Engine.capture)  # type: ignore[method-assign]
    Saver.wait = with_trouble("end", Saver.wait)  # type: ignore[method-assign]
    build.build_engine = with_trouble("start", build.build_engine)
    runpy.run_path(str(Path(__file__).parents[2] / "launch" / "train.py"), run_name="__main__")
