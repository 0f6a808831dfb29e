"""Stand-ins for the parts around loop and checkpoints: ranks as threads, an engine of one weight, a loader of lists."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stack.data.batch import IGNORE, MicroBatch
from stack.dist.topology import Topology

NAN_LOSS, NAN_GRADIENT = 99, 98  # token ids that spoil a step of FakeEngine


def one_rank() -> Topology:
    """The topology of a plain process."""
    return Topology(0, 1, 1, 1, 0, 0, torch.device("cpu"), None, None)


class Ended(Exception):
    """Another rank failed while this one waited for it: where `failure.guard` would end the process."""


class ThreadTopology(Topology):
    """One of N ranks that are threads of this process; made by `on_threads`."""

    def __init__(self, rank: int, world: int, sp: int, shared: dict[str, Any]):
        super().__init__(rank, world, sp, world // sp, rank % sp, rank // sp, torch.device("cpu"), None, None)
        self._shared = shared

    def gather_objects(self, value: Any) -> list[Any]:
        try:
            self._shared["values"][self.rank] = value
            self._shared["barrier"].wait(timeout=20)
            values = list(self._shared["values"])
            self._shared["barrier"].wait(timeout=20)
        except threading.BrokenBarrierError:
            raise Ended from None
        return values

    def sum_each(self, values: Any) -> Any:
        return [sum(column) for column in zip(*self.gather_objects(list(values)), strict=True)]

    def barrier(self) -> None:
        self.gather_objects(None)

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]


def on_threads(world: int, function: Callable[[Topology], Any], sp: int = 1) -> list[Any]:
    """`function` on each of `world` ranks; a rank's exception takes the place of its value."""
    shared: dict[str, Any] = {"values": [None] * world, "barrier": threading.Barrier(world)}
    results: list[Any] = [None] * world

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadTopology(rank, world, sp, shared))
        except Exception as error:  # noqa: BLE001  the test looks at it
            results[rank] = error
            shared["barrier"].abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


@dataclass
class StepResult:
    """As `stack.engine.handle.StepResult`, which would import DeepSpeed."""

    grad_norm: float
    clipped: bool
    skipped: str | None
    loss_scale: float | None


class FakeMethod:
    """Counts targets as the real methods do."""

    def count_targets(self, batch: MicroBatch) -> int:
        return batch.num_targets


def batch_of(*rows: list[int]) -> MicroBatch:
    """A micro-batch of one document a row; a token id of 0 is padding, and the last token has no target."""
    ids = torch.tensor(rows)
    labels = torch.full_like(ids, IGNORE)
    labels[:, :-1] = torch.where(ids[:, 1:] > 0, ids[:, 1:], torch.tensor(IGNORE))
    seq = ids.shape[1]
    bounds = [0]
    for index, row in enumerate(rows):
        length = sum(token > 0 for token in row)
        bounds += [index * seq + length] * (0 < length < seq) + [(index + 1) * seq]
    positions = torch.arange(seq).expand(len(rows), seq).contiguous()
    row_tokens = tuple(sum(token > 0 for token in row) for row in rows)
    return MicroBatch(ids, labels, positions, torch.tensor(bounds, dtype=torch.int32), row_tokens)


class FakeLoader:
    """Hands out the windows of one rank in order."""

    def __init__(self, windows: list[list[MicroBatch]]):
        self._windows, self.place = windows, 0

    def next_step(self) -> list[MicroBatch] | None:
        if self.place == len(self._windows):
            return None
        self.place += 1
        return self._windows[self.place - 1]

    def describe_last_step(self) -> list[str]:
        return [f"window {self.place}"]

    def state(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def shard_name(rank: int) -> str:
    """As DeepSpeed names the optimizer shards at stages 1 to 3."""
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


class FakeEngine:
    """One weight w; a target t costs (w - t - noise)^2 / 100, the noise drawn from torch's and Python's generators."""

    def __init__(self, topology: Topology, noise: float = 0.0, loss_scale: float | None = None):
        self.weight, self.noise, self.topology = torch.tensor(1.0, dtype=torch.float64), noise, topology
        self.loss_scale = loss_scale
        self.gradient = 0.0
        self.calls: list[str] = []

    def _losses(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        targets = batch.labels[batch.labels != IGNORE].double()
        noise = self.noise * (torch.rand(()).double() + random.random()) if self.noise else 0.0
        difference = self.weight - targets - noise
        return (difference**2 / 100).sum(), (difference / 50).sum()

    def forward_backward(self, method: Any, batch: MicroBatch, num_targets: int) -> Tensor:
        self.calls.append(f"forward of {num_targets}")
        loss, gradient = self._losses(batch)
        bad_loss, bad_gradient = NAN_LOSS in batch.input_ids, NAN_GRADIENT in batch.input_ids
        self.gradient += math.nan if bad_loss or bad_gradient else float(gradient) / num_targets
        return torch.tensor(math.nan) if bad_loss else loss.float()

    def step(self, lr: float) -> StepResult:
        self.calls.append(f"step {lr:g}")
        gradient, self.gradient = self.topology.sum(self.gradient), 0.0
        if not math.isfinite(gradient):
            reason = "nonfinite" if self.loss_scale is None else "loss-scale"
            return StepResult(math.inf, True, reason, self.loss_scale)
        self.weight = self.weight - lr * gradient
        return StepResult(abs(gradient), abs(gradient) > 0.5, None, self.loss_scale)

    def evaluate(self, method: Any, batch: MicroBatch) -> Tensor:
        return self._losses(batch)[0].float()

    def capture(
        self, folder: Path, tag: str, client_state: dict[str, Any], to_host: bool = True
    ) -> dict[str, Any]:
        content = {"weight": float(self.weight), "state": copy.deepcopy(client_state)}
        return {shard_name(self.topology.rank): content}

    def load(self, folder: Path, tag: str) -> dict[str, Any]:
        content = torch.load(folder / tag / shard_name(self.topology.rank), weights_only=True)
        self.weight = torch.tensor(content["weight"], dtype=torch.float64)
        return content["state"]

    def fill(self, source: Any, with_states: bool = True) -> None:
        self.calls.append(f"filled {'with' if with_states else 'without'} states")
