"""What a run has to remember besides weights and optimizer: counters, place in the data, random states."""

from __future__ import annotations

import hashlib
import random
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import nn

from stack.errors import CheckpointError

CLIENT_KEY = "train_state"
"""Where the state stands in DeepSpeed's client state, which has keys of its own and drops others of the same name."""


@dataclass
class TrainState:
    """Counters of the whole run, the same on every rank and for any number of ranks.

    One step is one window of data (micro-batches x ranks): a skipped or empty step counts as a step, so that data order
    and learning rate depend on the step alone.
    """

    step: int = 0
    """Windows of data that were read."""

    tokens: int = 0
    """Tokens read, padding left out."""

    targets: int = 0
    """Tokens predicted."""

    skipped_steps: int = 0
    """Steps whose loss or gradient was NaN or inf; they changed nothing."""

    nonfinite_in_row: int = 0
    """Skipped steps since the last good one."""

    overflow_steps: int = 0
    """Steps skipped by fp16 loss scaling, which is a normal part of it."""

    empty_steps: int = 0
    """Steps without any target; they changed nothing."""

    small_steps: int = 0
    """Incomplete last windows of an epoch: steps with fewer rows."""

    dropped_steps: int = 0
    """Steps whose update was left out by a policy: spikes, and data passed over after going back."""

    rollbacks: int = 0
    """Times that the run went back to a checkpoint."""

    passed_over: list[int] = field(default_factory=list)
    """Steps whose data is read and not learned from, since it spoiled the run once."""

    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last good steps, which a spike is compared with."""

    pending_record: dict[str, Any] = field(default_factory=dict)
    """Record of this step, if its evaluation was cut short by a stop: a resumed run completes it first."""

    loader: dict[str, Any] = field(default_factory=dict)
    """Place in the data, as `Loader.state()` gives it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for DeepSpeed's client state and for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """The state that `to_dict` gave. Keys of later versions are left out, counters of later versions start anew; without
        its place a run cannot go on."""
        names = [item.name for item in fields(cls) if item.name in values]
        missing = [name for name in ("step", "tokens", "targets", "loader") if name not in values]
        if missing:
            raise CheckpointError(
                f"the checkpoint's state lacks {', '.join(missing)}: it was saved by another version"
            )
        return cls(**{name: values[name] for name in names})


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators (and the device's) as plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(states: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` gave; a state of a device that this rank does not use is left out."""
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Number of parameters, and of frozen ones, and a hash of their names, full shapes and which are frozen: the same for
    sharded and whole parameters."""
    digest, total, frozen = hashlib.sha256(), 0, 0
    for name, parameter in sorted(model.named_parameters()):
        shape = tuple(
            getattr(parameter, "ds_shape", parameter.shape)
        )  # ZeRO-3 keeps the full shape beside the shard
        digest.update(f"{name}{shape}{'' if parameter.requires_grad else ' frozen'};".encode())
        numel = int(np.prod(shape, dtype=np.int64))
        total, frozen = total + numel, frozen + (0 if parameter.requires_grad else numel)
    return {"parameters": total, "frozen": frozen, "hash": digest.hexdigest()[:16]}
