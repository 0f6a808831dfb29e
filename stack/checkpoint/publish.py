"""From files of all ranks to one published checkpoint: rank 0's part of a save, on its writing thread."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stack.checkpoint.manifest import (
    Manifest,
    hash_of,
    list_files,
    missing_ranks,
    step_folder_name,
    write_manifest,
)
from stack.checkpoint.state import TrainState
from stack.errors import CheckpointError


@dataclass
class Origin:
    """What the manifests of a run say of it."""

    run: str
    """Its name."""
    layout: dict[str, Any]
    """See `Manifest.layout`."""
    steps_planned: int
    settings: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration."""
    wandb_run_id: Callable[[], str | None] = lambda: None
    """Asked at each save: W&B starts after the first part of a run."""

    def describe(
        self, state: TrainState, metrics: dict[str, float], files: dict[str, tuple[int, str]]
    ) -> Manifest:
        """files: path -> (bytes, checksum)."""
        return Manifest(
            step=state.step,
            layout=self.layout,
            steps_planned=self.steps_planned,
            versions=versions(),
            files={name: size for name, (size, _) in files.items()},
            checksums={name: checksum for name, (_, checksum) in files.items()},
            tokens=state.tokens,
            settings=self.settings,
            config_hash=hash_of(self.settings),
            run=self.run,
            wandb_run_id=self.wandb_run_id(),
            metrics=metrics,
        )


@cache
def versions() -> dict[str, str]:
    """Of what writes and reads the files; `commit` is empty where the code is no git checkout."""
    packages = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"python": platform.python_version(), **packages, "commit": _commit()}


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine
        return ""


def publish(part: Path, manifest: Manifest) -> Path:
    """Give the whole folder its name, in one step. Raises CheckpointError if it is not whole, OSError as the disk does."""
    check_set(part, manifest)
    write_manifest(part, manifest)
    for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
        sync_folder(folder)
    target = part.with_name(step_folder_name(manifest.step))
    replaced = part.with_name(f"{target.name}.replaced.partial")
    # A broken one of the same step, passed over when the run was resumed, or the same once more. A link counts, whether or
    # not it leads anywhere.
    if os.path.lexists(target):
        target.rename(replaced)
    part.rename(target)
    sync_folder(target.parent)
    # The new one is complete; what cannot be removed of the old one is tried again, and told, before the next save.
    with suppress(OSError):
        remove_tree(replaced)
    return target


def remove_tree(path: Path) -> None:
    """Delete a folder with all in it. Of a link, which a person made to use another disk, only the link goes. Raises
    OSError."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def free_name(path: Path, ending: str) -> Path:
    """`path` with `.ending` behind it, and a number where that is taken: what is set aside replaces nothing."""
    target, count = path.with_name(f"{path.name}.{ending}"), 1
    while target.exists():
        target, count = path.with_name(f"{path.name}.{ending}{count}"), count + 1
    return target


def check_set(part: Path, manifest: Manifest) -> None:
    """Every file of every rank lies here as it was written, and no other. Files of other nodes do not, where the folder is
    local to a node."""
    found = list_files(part)
    wrong = sorted(
        {name for name, size in manifest.files.items() if found.get(name) != size}
        | (found.keys() - manifest.files.keys())
    )
    missing = missing_ranks(manifest.files, manifest.layout)
    if wrong or missing:
        raise CheckpointError(
            f"{part} does not hold the files of all ranks ({', '.join([*wrong, *([missing] if missing else [])])}). "
            "Fix: let `out` be a folder that all nodes share"
        )


def sync_folder(folder: Path) -> None:
    """Have the disk hold the names in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some mounted file systems keep names without being asked, and refuse the call
        pass
    finally:
        os.close(descriptor)
