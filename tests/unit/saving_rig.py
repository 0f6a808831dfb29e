"""Savers for the tests of saving, and a hold on what reaches the disk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import stack.checkpoint.writer as writer
from stack.checkpoint.publish import Origin
from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState
from stack.config.schema_checkpoint import CheckpointConfig
from stack.dist.topology import Topology
from tests.unit.train_fakes import FakeEngine, one_rank

LAYOUT = {"world": 1, "sp": 1, "stage": 3}


def make_saver(folder: Path, topology: Topology, told: list[str] | None = None, **policy: Any) -> Saver:
    origin = Origin("mine", LAYOUT | {"world": topology.world}, 12, {"a": 1}, lambda: "wb1")
    tell = (lambda text: None) if told is None else told.append
    return Saver(folder, topology, origin, CheckpointConfig(**policy), tell)


def save_steps(folder: Path, *steps: int, losses: dict[int, float] | None = None, **policy: Any) -> None:
    topology = one_rank()
    saver = make_saver(folder, topology, **policy)
    for step in steps:
        metrics = {"eval_loss": losses[step]} if losses and step in losses else {}
        saver.save(FakeEngine(topology), TrainState(step=step, loader={"place": step}), metrics)
    saver.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, closed: bool = True):
        self.open, self.reached = threading.Event(), threading.Event()
        if not closed:
            self.open.set()
        self.broken: OSError | None = None
        real = writer.write_chunk

        def write(descriptor: int, chunk: memoryview) -> None:
            self.reached.set()
            assert self.open.wait(20)
            if self.broken is not None:
                raise self.broken
            real(descriptor, chunk)

        monkeypatch.setattr(writer, "write_chunk", write)
