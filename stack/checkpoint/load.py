"""Refuse a checkpoint that does not fit the run, and put everything back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from stack.checkpoint.differences import ROWS, Difference, differences, is_forced, spoils
from stack.checkpoint.find import Checkpoint
from stack.checkpoint.manifest import rng_name, step_folders
from stack.checkpoint.publish import free_name
from stack.checkpoint.state import CLIENT_KEY, TrainState, restore_random_state
from stack.checkpoint.zero_files import ZeroFiles
from stack.dist.topology import Topology
from stack.errors import CheckpointError, DataError

SHAPE = ("world", "stage", "precision", "optimizer", "cpu_optimizer", "nvme", "states_on", "sub_group")
"""What DeepSpeed's files depend on. Only under equal ones does it load them itself: Adam's count of steps, for one, is a
tensor where the states are under torch's fused kernel, and a number in DeepSpeed's CPUAdam. It loads none into states on
NVMe."""


class LoadingEngine(Protocol):
    """What loading needs of an engine."""

    def load(self, folder: Path, tag: str) -> dict[str, Any]: ...

    def fill(self, source: ZeroFiles, with_states: bool = True) -> None: ...


class LoadingLoader(Protocol):
    """What loading needs of a loader."""

    def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Way:
    """How a checkpoint is put back. The defaults are those of a run that goes on as it was."""

    as_saved: bool = True
    """By DeepSpeed itself, bit for bit. False: read parameter by parameter, for other ranks, ZeRO stage or type, and for states
    on NVMe."""
    with_states: bool = True
    """False: the optimizer starts anew."""
    other_rows: bool = False
    """True: where the data is not what it was, it is read from its first row on."""


AS_IT_WAS = Way()


def way_of(checkpoint: Checkpoint, layout: dict[str, Any], other_rows: bool = False) -> Way:
    """How to put `checkpoint` back into a run of this layout."""
    saved = checkpoint.manifest.layout
    same_optimizer = saved.get("optimizer", layout.get("optimizer")) == layout.get("optimizer")
    return Way(fits_as_saved(checkpoint, layout), same_optimizer, other_rows)


def check_layout(checkpoint: Checkpoint, layout: dict[str, Any], force: Sequence[str] = ()) -> None:
    """Raises CheckpointError if the run's layout is one that the checkpoint cannot be brought into, naming both.

    layout: today's, as `train/resume.py` makes it; the model's fingerprint is judged once it is there.
    """
    saved = checkpoint.manifest.layout
    rows = layout.get("rows_per_step"), saved.get("rows_per_step")
    if None not in rows and rows[0] != rows[1] and not is_forced(ROWS, force):
        fits = saved["rows_per_step"] * layout.get("accumulation", 1) / layout["rows_per_step"]
        wanted = (
            f"{ROWS}={int(fits)}"
            if fits == int(fits)
            else "another number of ranks, parallel.sp or data.micro_batch"
        )
        raise CheckpointError(
            f"{checkpoint.path}: rows_per_step: saved {rows[1]}, now {rows[0]}: steps would no longer read what they were to. "
            f"Fix: {wanted} keeps {rows[1]} rows a step; checkpoint.force=[{ROWS}] goes on with {rows[0]} from the row "
            "where it stopped"
        )
    if "model" in layout and "model" in saved and layout["model"] != saved["model"]:
        raise CheckpointError(
            f"{checkpoint.path} holds another model: saved {saved['model']}, now {layout['model']}. Fix: restore the saved "
            "model settings; nothing can bring these weights into another shape"
        )


def fits_as_saved(checkpoint: Checkpoint, layout: dict[str, Any]) -> bool:
    """Whether DeepSpeed can load the files itself."""
    saved = checkpoint.manifest.layout
    return not layout.get("nvme") and all(saved.get(key, layout.get(key)) == layout.get(key) for key in SHAPE)


def check_settings(checkpoint: Checkpoint, now: dict[str, Any], force: Sequence[str]) -> list[Difference]:
    """What differs from the saved settings, apart from how and where is saved. Raises CheckpointError with all that would
    spoil the run and is not in `force`."""
    found = [
        each
        for each in differences(checkpoint.manifest.settings, now)
        if each.key not in ("name", "out") and not each.key.startswith("checkpoint.")
    ]
    spoiling = [(each, spoils(each)) for each in found if not is_forced(each.key, force)]
    refused = [f"  - {each} ({what})" for each, what in spoiling if what]
    if refused:
        names = ",".join(each.key for each, what in spoiling if what)
        raise CheckpointError(
            f"{checkpoint.path} was saved under settings whose change would spoil the run:\n"
            + "\n".join(refused)
            + "\n"
            f"Fix: restore the saved values; or take the changes by name: checkpoint.force=[{names}]; or begin a new run "
            f"from these weights: name=NEW_NAME checkpoint.weights_from={checkpoint.path}"
        )
    return found


def load_checkpoint(
    checkpoint: Checkpoint,
    engine: LoadingEngine,
    loader: LoadingLoader,
    topology: Topology,
    way: Way = AS_IT_WAS,
) -> TrainState:
    """Collective. Puts weights, optimizer, place in the data and random states back; returns the counters. Also brings a
    live engine back to an earlier step."""
    path = checkpoint.path
    if way.as_saved:
        client_state = engine.load(path.parent, path.name)
    else:
        files = ZeroFiles(path, checkpoint.manifest)
        engine.fill(files, way.with_states)
        client_state = files.client_state
    state = TrainState.from_dict(client_state.get(CLIENT_KEY, {}))
    if state.step != checkpoint.manifest.step:
        raise CheckpointError(f"{path} holds step {state.step}, its manifest says {checkpoint.manifest.step}")
    try:
        loader.load_state(state.loader)
    except DataError:
        if not way.other_rows:
            raise
    _restore_random(path / rng_name(topology.rank), state.step, topology)
    return state


def _restore_random(file: Path, step: int, topology: Topology) -> None:
    if file.exists():
        restore_random_state(torch.load(file, weights_only=True), topology.device)
        return
    # More ranks than were saved: a stream of its own, which differs from that of the run's start.
    seed = step * 1_000_003 + topology.rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_aside_newer(folder: Path, chosen: Checkpoint, tell: Callable[[str], None]) -> None:
    """Going back to an older checkpoint of this run: the newer ones belong to a course that is given up, and `auto` must
    not take them up at the next restart. They are renamed, not deleted. Run it on one rank."""
    own = step_folders(folder)
    if chosen.path.resolve() not in [path.resolve() for path in own]:
        return
    for path in own:
        if path.resolve() == chosen.path.resolve():
            return
        target = free_name(path, "abandoned")
        path.rename(target)
        tell(f"going back to {chosen.path.name}: {path.name} was renamed to {target.name}")
