"""What each rank runs for the tests of exact resume: whole runs one after the other, in one process."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from stack.config.compose import compose_config
from stack.dist.env import RankEnv
from stack.dist.topology import Topology
from stack.dist.watch import Watch

STEPS, STOP = 5, 2
TIMES = ("_s", "_gib", "fu", "_per_rank")
PLAIN = str.maketrans({" ": "_", ",": None})


def train(*overrides: str) -> dict[str, Any]:
    """One run from beginning to end: its journal without times, and a hash of the exported weights."""
    from stack.train.run import run

    cfg = compose_config(["+exp=tiny_cpu", *overrides])
    with mock.patch.dict(os.environ):  # a run sets the variables of its rank
        run(cfg)
    folder = Path(cfg.out) / cfg.name
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    journal = [{key: value for key, value in line.items() if not key.endswith(TIMES)} for line in lines]
    weights = (folder / "hf" / "model.safetensors").read_bytes() if cfg.checkpoint.export else b""
    return {"journal": journal, "weights": hashlib.sha256(weights).hexdigest()}


@contextmanager
def bare_guard(env: RankEnv) -> Iterator[Watch]:
    """The real one is for one run a process."""
    yield Watch(env)


def straight_and_resumed(folder: str, cases: dict[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
    """Each case straight through, and from the checkpoint of step STOP in a run of its own."""
    os.chdir(folder)
    found = {}
    # DeepSpeed keeps the groups of its first engine for the whole process, so all runs share them.
    with mock.patch.object(Topology, "close"), mock.patch("stack.train.run.guard", bare_guard):
        for number, (name, overrides) in enumerate(cases.items()):
            plan = [*overrides, f"schedule.steps={STEPS}", f"name=straight{number}"]
            straight = train(*plan, f"checkpoint.every={STOP}", "checkpoint.keep=0")
            begin = f"checkpoint.resume=runs/straight{number}/checkpoints/step_{STOP:06d}"
            found[name] = [straight, train(*plan, f"name=resumed{number}", begin, "checkpoint.final=false")]
    return found


def resumed_elsewhere(folder: str, number: int, cases: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Runs that go on from the checkpoint of case `number`, saved under another shape."""
    os.chdir(folder)
    found = {}
    begin = f"checkpoint.resume=runs/straight{number}/checkpoints/step_{STOP:06d}"
    with mock.patch.object(Topology, "close"), mock.patch("stack.train.run.guard", bare_guard):
        for name, overrides in cases.items():
            output = StringIO()
            with redirect_stdout(output):
                plan = [*overrides, f"schedule.steps={STEPS}", f"name={name.translate(PLAIN)}", begin]
                seen = train(*plan, "checkpoint.final=false", "checkpoint.export=false")
            found[name] = seen | {"output": output.getvalue()}
    return found
