"""Weights for a fresh start from another run's checkpoint, at whatever shape it was saved, or from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stack.checkpoint.find import Checkpoint, inspect
from stack.checkpoint.manifest import FILE_NAME, step_folders
from stack.checkpoint.zero_files import ZeroFiles
from stack.config.schema import RunConfig
from stack.dist.topology import Topology
from stack.errors import CheckpointError
from stack.models.build import DTYPES
from stack.models.safetensors_file import Entry, read_headers
from stack.train.console import tell


def find_weights(
    cfg: RunConfig, checkpoint: Checkpoint | None, topology: Topology
) -> Mapping[str, Entry] | None:
    """Parameter or tensor name -> where it is, for `checkpoint.weights_from`; None where that is not set. Collective.

    checkpoint: the one that the run goes on from, whose own weights serve then: the folder may be gone by now. A rank that
    reads no weights (ZeRO-3 spreads those of rank 0) gets an empty mapping. Raises CheckpointError, ModelError.
    """
    if cfg.checkpoint.weights_from is None:
        return None
    folder = Path(cfg.checkpoint.weights_from).expanduser().resolve()
    found: Checkpoint | str | None = checkpoint
    if checkpoint is None and (folder / FILE_NAME).exists():
        found = inspect(folder, topology, tell if topology.is_main else lambda text: None)
    elif checkpoint is None and (inside := step_folders(folder / "checkpoints") or step_folders(folder)):
        found = f"{folder} holds checkpoints: name one, such as {inside[0]}"
    if isinstance(found, str):
        raise CheckpointError(f"checkpoint.weights_from={cfg.checkpoint.weights_from}: {found}")
    if not topology.is_main and cfg.engine.stage == 3:
        return {}
    if found is None:
        return read_headers(folder)
    return ZeroFiles(found.path, found.manifest).entries(DTYPES[cfg.engine.precision])
