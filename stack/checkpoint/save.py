"""Save a checkpoint so that a half-written one can never be taken for a whole one."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from stack.checkpoint.manifest import (
    Manifest,
    list_files,
    read_manifest,
    step_folder_name,
    step_folders,
    write_manifest,
)
from stack.checkpoint.state import CLIENT_KEY, TrainState, random_state
from stack.dist.agree import on_main
from stack.dist.topology import Topology
from stack.errors import CheckpointError


class SavingEngine(Protocol):
    """What saving needs of an engine."""

    def save(self, folder: Path, tag: str, client_state: dict[str, Any]) -> None: ...


@dataclass
class Saver:
    """Saves checkpoints of one run below `folder`, and deletes old ones."""

    folder: Path
    topology: Topology
    layout: dict[str, Any]
    """See `Manifest.layout`."""
    steps_planned: int
    keep: int
    """Newest checkpoints kept; 0: all."""
    tell: Callable[[str], None] = print
    """Takes a line for the person at the console, on rank 0."""

    def save(self, engine: SavingEngine, state: TrainState) -> Path:
        """Collective. Writes `step_NNNNNN` and returns its path. Raises CheckpointError if a file cannot be written; older
        checkpoints are untouched then."""
        name = step_folder_name(state.step)
        part = self.folder / f"{name}.partial"
        on_main(self.topology, lambda: self._clear(part))
        with _as_checkpoint_error(part, self.topology.rank):
            engine.save(self.folder, part.name, {CLIENT_KEY: state.to_dict()})
            torch.save(random_state(self.topology.device), part / _rng_name(self.topology.rank))
        self.topology.barrier()
        return on_main(self.topology, lambda: self._complete(part, self.folder / name, state.step))

    def _clear(self, part: Path) -> None:
        """Room for the new folder: left-overs of saves that were cut short are removed."""
        with _as_checkpoint_error(part, 0):
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("step_*.partial"):
                shutil.rmtree(old)
            part.mkdir()

    def _complete(self, part: Path, target: Path, step: int) -> Path:
        files = list_files(part)
        self._check_ranks(part, files)
        with _as_checkpoint_error(part, 0):
            write_manifest(part, Manifest(step, self.layout, self.steps_planned, _versions(), files))
            if target.exists():  # a broken one of the same step, passed over when the run was resumed
                shutil.rmtree(target)
            part.rename(target)
            self._delete_old(target)
        self.tell(f"checkpoint of step {step}: {target}, {sum(files.values()) / 1e9:.3f} GB")
        return target

    def _check_ranks(self, part: Path, files: dict[str, int]) -> None:
        """Every rank's files must lie here; they do not where the folder is local to a node."""
        world = self.topology.world
        missing = [rank for rank in range(world) if _rng_name(rank) not in files]
        shards = sum(name.endswith("optim_states.pt") for name in files)
        expected = world if self.layout["stage"] >= 1 else 0
        if missing or shards < expected:
            raise CheckpointError(
                f"{part} lacks files of other ranks (random states of ranks {missing}, {shards} of {expected} optimizer "
                "shards). Fix: let `out` be a folder that all nodes share"
            )

    def _delete_old(self, newest: Path) -> None:
        if self.keep == 0:
            return
        older = [path for path in step_folders(self.folder) if path != newest]
        whole = [path for path in older if _is_complete(path)]
        for path in set(older) - set(whole[: self.keep - 1]):
            # Renamed first, so that a deletion that is cut short leaves nothing that looks like a checkpoint.
            path = path.rename(path.with_name(f"{path.name}.partial"))
            shutil.rmtree(path)


@contextmanager
def _as_checkpoint_error(part: Path, rank: int) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise CheckpointError(f"rank {rank} could not save the checkpoint {part}: {error}") from error


def _rng_name(rank: int) -> str:
    return f"rng_rank_{rank:05d}.pt"


def _is_complete(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"python": platform.python_version(), **packages}
