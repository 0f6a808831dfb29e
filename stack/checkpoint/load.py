"""Find the checkpoint to continue from, refuse what does not fit, and put everything back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from stack.checkpoint.manifest import Manifest, read_manifest, step_folders
from stack.checkpoint.state import CLIENT_KEY, TrainState, restore_random_state
from stack.dist.topology import Topology
from stack.errors import CheckpointError


class LoadingEngine(Protocol):
    """What loading needs of an engine."""

    def load(self, folder: Path, tag: str) -> dict[str, Any]: ...


class LoadingLoader(Protocol):
    """What loading needs of a loader."""

    def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest


def find_checkpoint(folder: Path, resume: str, tell: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that `checkpoint.resume` asks for, or None for a fresh start. Reads files only; run it on one rank.

    folder: where this run's own checkpoints lie. resume: `auto`, `none` or a path. Raises CheckpointError if the path is
    not a complete checkpoint, if `none` meets checkpoints, or if `auto` meets only broken ones.
    """
    own = step_folders(folder)
    if resume == "none":
        if own:
            raise CheckpointError(
                f"checkpoint.resume=none, but {folder} holds {len(own)} checkpoint(s), newest {own[0].name}. Fix: give "
                "the new run another name, remove the folder, or use checkpoint.resume=auto"
            )
        return None
    if resume != "auto":
        path = Path(resume).expanduser().resolve()
        try:
            return Checkpoint(path, read_manifest(path))
        except CheckpointError as error:
            inside = step_folders(path) or step_folders(path / "checkpoints")
            hint = f". Fix: name one checkpoint, such as checkpoint.resume={inside[0]}" if inside else ""
            raise CheckpointError(f"{error}{hint}") from error
    return _newest_complete(folder, own, tell)


def _newest_complete(folder: Path, own: list[Path], tell: Callable[[str], None]) -> Checkpoint | None:
    if not own:
        tell(f"no checkpoint in {folder}: starting from step 0")
        return None
    for path in own:
        try:
            return Checkpoint(path, read_manifest(path))
        except CheckpointError as error:
            tell(f"warning: passing over a checkpoint: {error}")
    raise CheckpointError(
        f"none of the {len(own)} checkpoint(s) in {folder} is complete. Fix: remove them to start from step 0, or give the "
        "run another name"
    )


def check_layout(checkpoint: Checkpoint, layout: dict[str, Any]) -> None:
    """Raises CheckpointError if the run differs from the saved one in any of the keys given, naming both values."""
    saved = checkpoint.manifest.layout
    differing = [
        f"{key}: saved {saved.get(key)}, now {layout[key]}" for key in layout if saved.get(key) != layout[key]
    ]
    if differing:
        raise CheckpointError(
            f"{checkpoint.path} was saved under another layout ({'; '.join(differing)}). Fix: start with the saved values, "
            "or begin a new run from its weights: finish it under the saved values, which writes its Hugging Face folder "
            "`hf`, then set `name` to a new name, `model.path` to that folder and `model.init` to pretrained"
        )


def load_checkpoint(
    checkpoint: Checkpoint, engine: LoadingEngine, loader: LoadingLoader, topology: Topology
) -> TrainState:
    """Collective. Puts weights, optimizer, place in the data and random states back; returns the counters."""
    client_state = engine.load(checkpoint.path.parent, checkpoint.path.name)
    state = TrainState.from_dict(client_state.get(CLIENT_KEY, {}))
    if state.step != checkpoint.manifest.step:
        raise CheckpointError(
            f"{checkpoint.path} holds step {state.step}, its manifest says {checkpoint.manifest.step}"
        )
    loader.load_state(state.loader)
    rng = torch.load(checkpoint.path / f"rng_rank_{topology.rank:05d}.pt", weights_only=True)
    restore_random_state(rng, topology.device)
    return state


def set_aside_newer(folder: Path, chosen: Checkpoint, tell: Callable[[str], None]) -> None:
    """Going back to an older checkpoint of this run: the newer ones belong to a course that is given up, and `auto` must
    not take them up at the next restart. They are renamed, not deleted. Run it on one rank."""
    own = step_folders(folder)
    if chosen.path.resolve() not in [path.resolve() for path in own]:
        return
    for path in own:
        if path.resolve() == chosen.path.resolve():
            return
        target, count = path.with_name(f"{path.name}.abandoned"), 1
        while target.exists():
            target, count = path.with_name(f"{path.name}.abandoned{count}"), count + 1
        path.rename(target)
        tell(f"going back to {chosen.path.name}: {path.name} was renamed to {target.name}")
