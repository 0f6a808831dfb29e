"""The list of contents that makes a checkpoint complete, and what it was saved under."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stack.errors import CheckpointError

FILE_NAME = "manifest.json"
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


@dataclass
class Manifest:
    """Written last into a checkpoint folder."""

    step: int
    layout: dict[str, Any]
    """What a resuming run has to share: world, sp, stage, precision, optimizer, model fingerprint."""
    steps_planned: int
    """Length of the run in steps when this was saved; the course of the learning rate depends on it."""
    versions: dict[str, str]
    files: dict[str, int]
    """Path inside the folder to size in bytes, for every file but the manifest."""


def step_folder_name(step: int) -> str:
    """Folder name of a checkpoint, sortable up to a million steps."""
    return f"step_{step:06d}"


def step_folders(folder: Path) -> list[Path]:
    """The checkpoint folders below `folder`, complete or not, newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def list_files(folder: Path) -> dict[str, int]:
    """Relative path to size in bytes of every file below `folder`, the manifest left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    sizes.pop(FILE_NAME, None)
    return sizes


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and have it on the disk before this returns."""
    with open(folder / FILE_NAME, "w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint. Raises CheckpointError naming what is missing or cut short."""
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {FILE_NAME}: it was not saved to its end, or is no checkpoint"
        )
    try:
        manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    sizes = list_files(folder)
    wrong = [
        f"{name} ({'missing' if name not in sizes else f'{sizes[name]} bytes'}, saved {size} bytes)"
        for name, size in manifest.files.items()
        if sizes.get(name) != size
    ]
    if wrong:
        raise CheckpointError(f"{folder} is not complete: {', '.join(wrong)}")
    return manifest
