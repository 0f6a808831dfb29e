"""The run folder `<out>/<name>`: one per job, the same one after a restart, used by one job at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from stack.config.convert import as_yaml
from stack.config.schema import RunConfig
from stack.errors import LaunchError


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
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def model(self) -> Path:
        """The Hugging Face folder written at the end."""
        return self.path / "hf"


def take_folder(path: Path, tell: Callable[[str], None]) -> tuple[RunFolder, IO[str]]:
    """Make the folder if need be, and lock it for this job. For rank 0 alone.

    Returns the folder and the open lock; the lock ends with the process, however that ends. Raises LaunchError if
    another job holds it or the folder cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path / "lock", tell)
    except OSError as error:
        raise LaunchError(
            f"the run folder {path} cannot be used: {error}. Fix: set `out` to a folder you can write"
        ) from error
    return RunFolder(path), lock


def _lock(path: Path, tell: Callable[[str], None]) -> IO[str]:
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  open as long as the lock is held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise LaunchError(
            f"the run folder {path.parent} is in use by {holder}. Fix: wait for that run to end, or give this one another "
            "name: name=NEW_NAME"
        ) from error
    except OSError as error:  # some network file systems have no locks: a hint is all that can be given there
        tell(f"warning: {path.parent} cannot be locked ({error}): start no second run of this name")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def write_config(folder: RunFolder, cfg: RunConfig, tell: Callable[[str], None]) -> None:
    """Save the settings of this start, and tell which differ from the last one's. For rank 0 alone, once nothing can
    refuse them any more."""
    new = asdict(cfg)
    if folder.config.exists():
        old = yaml.safe_load(folder.config.read_text(encoding="utf-8")) or {}
        changes = list(_differences(old, new))
        if changes:
            tell("settings that differ from the last start of this run: " + "; ".join(changes))
    part = folder.config.with_name("config.yaml.partial")
    part.write_text(as_yaml(cfg), encoding="utf-8")
    os.replace(part, folder.config)


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in [*new, *(key for key in old if key not in new)]:
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            found += _differences(before, now, f"{prefix}{key}.")
        elif before != now:
            found.append(f"{prefix}{key} {before!r} -> {now!r}")
    return found
