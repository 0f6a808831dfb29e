"""The run folder `<out>/<name>`: one per job, the same one after a restart, used by one job at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stack.config.convert import as_yaml
from stack.config.schema import RunConfig
from stack.errors import LaunchError
from stack.train.run_lock import RunLock, take_lock


@dataclass(frozen=True)
class RunFolder:
    """Where the parts of a run lie."""

    path: Path

    @property
    def config(self) -> Path:
        """The settings of the last start, resolved."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def calibration(self) -> Path:
        """What was measured and the forecast had missed."""
        return self.path / "calibration.jsonl"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def stopped(self) -> Path:
        """There while the run is stopped on purpose and can be resumed."""
        return self.path / "stopped.json"

    @property
    def stacks(self) -> Path:
        """Where each rank stood when one of them hung."""
        return self.path / "stacks"

    @property
    def model(self) -> Path:
        """The Hugging Face folder written at the end."""
        return self.path / "hf"


def take_folder(path: Path, tell: Callable[[str], None]) -> tuple[RunFolder, RunLock]:
    """Make the folder if need be, and lock it for this job. For rank 0 alone.

    Returns the folder and its lock, which ends with the process, however that ends. Raises LaunchError if another job holds
    it or the folder cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path / "lock", tell)
    except OSError as error:
        raise LaunchError(
            f"the run folder {path} cannot be used: {error}. Fix: set `out` to a folder you can write"
        ) from error
    return RunFolder(path), lock


def write_whole(path: Path, text: str) -> None:
    """The file is complete or as it was, whenever the process ends. Raises OSError."""
    part = path.with_name(f"{path.name}.partial")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write_config(folder: RunFolder, cfg: RunConfig) -> None:
    """Save the settings of this start. For rank 0 alone, once nothing can refuse them any more. Raises LaunchError."""
    try:
        write_whole(folder.config, as_yaml(cfg))
    except OSError as error:
        raise LaunchError(
            f"{folder.config} cannot be written: {error}. Fix: free some space or mend the permissions, or set `out` to a "
            "folder that can be written"
        ) from error
