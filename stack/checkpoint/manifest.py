"""The list of contents that makes a checkpoint complete, and what it was saved under.

A checkpoint is judged in two parts. `read_manifest` is cheap and looks at every file of every rank: there, of the saved
size, and none besides. `verify_files` reads the bytes; ranks share that work.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from stack.errors import CheckpointError

FILE_NAME = "manifest.json"
CHUNK_BYTES = 8 * 2**20
OWN_SUFFIXES = (".pt", ".json", ".safetensors")
"""Of the files that a checkpoint consists of: a foreign one among them may be read in place of another."""
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
    """Of Python, the packages that wrote the files, and this project with its commit where that is known."""
    files: dict[str, int]
    """Path inside the folder to size in bytes, for every file of every rank but the manifest."""
    checksums: dict[str, str] = field(default_factory=dict)
    """Path inside the folder to the 128-bit xxh3 of the file, in hex. Empty in manifests of before there were any."""
    tokens: int = 0
    """Tokens read so far, padding left out."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The whole resolved configuration, as `config.convert.as_dict` gives it."""
    config_hash: str = ""
    """Of `settings`; see `hash_of`."""
    run: str = ""
    """Name of the run that wrote this. Only its own checkpoints does a run ever delete."""
    wandb_run_id: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Loss and evaluation of this very step, by the names of the journal."""


def hash_of(values: Any) -> str:
    """128-bit xxh3, in hex, of plain values, whatever the order of their keys."""
    return xxhash.xxh3_128_hexdigest(
        json.dumps(values, sort_keys=True, separators=(",", ":"), default=str).encode()
    )


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


def rng_name(rank: int) -> str:
    """The file with a rank's random states."""
    return f"rng_rank_{rank:05d}.pt"


def missing_ranks(files: dict[str, int], layout: dict[str, Any]) -> str:
    """What a complete checkpoint of this layout has and `files` have not, in words; empty if nothing is missing."""
    world = layout["world"]
    missing = [rank for rank in range(world) if rng_name(rank) not in files]
    shards = sum(name.endswith("optim_states.pt") for name in files)
    expected = world if layout["stage"] >= 1 else 0
    if not missing and shards >= expected:
        return ""
    return f"random states of ranks {missing}, {shards} of {expected} optimizer shards"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, closed by a checksum of its own, and have it on the disk before this returns."""
    content = asdict(manifest)
    with open(folder / FILE_NAME, "w", encoding="utf-8") as file:
        json.dump({**content, "digest": hash_of(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def parse_manifest(text: str) -> Manifest:
    """Raises ValueError or TypeError if this is not a manifest as it was written."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise TypeError("it holds no list of contents")
    digest = content.pop("digest", None)
    manifest = Manifest(**content)
    if digest != hash_of(content) and (digest is not None or manifest.checksums):
        raise ValueError("it is not as it was written: its own checksum differs")
    if not isinstance(manifest.files, dict) or not isinstance(manifest.layout, dict):
        raise TypeError("its files or its layout are no list of names")
    if any(".." in Path(name).parts or Path(name).is_absolute() for name in manifest.files):
        raise ValueError("it names files outside its folder")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint that has all its files and no others, each of the saved size.

    Hidden files, which file managers and network disks leave behind, do not count, nor do files not named like a
    checkpoint's: see `stray_files`. Raises CheckpointError naming what is missing, cut short or foreign.
    """
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {FILE_NAME}: it was not saved to its end, or is no checkpoint"
        )
    try:
        manifest = parse_manifest(path.read_text(encoding="utf-8"))
        wrong = list(_misfits(folder, manifest))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if wrong:
        raise CheckpointError(f"{folder} is not complete: {', '.join(wrong)}")
    return manifest


def _misfits(folder: Path, manifest: Manifest) -> Iterator[str]:
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match and int(match[1]) != manifest.step:
        yield f"{FILE_NAME} (of step {manifest.step}, in the folder of another)"
    sizes = list_files(folder)
    for name, size in manifest.files.items():
        if sizes.get(name) != size:
            yield f"{name} ({f'{sizes[name]} bytes' if name in sizes else 'missing'}, saved {size} bytes)"
    for name in sizes:
        if name not in manifest.files and Path(name).suffix in OWN_SUFFIXES and not _is_hidden(name):
            yield f"{name} (foreign: it was not saved with the others; move it away)"
    if missing := missing_ranks(manifest.files, manifest.layout):
        yield f"{FILE_NAME} (lacks {missing})"


def stray_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files that somebody put beside those of the checkpoint, such as notes; nothing reads them."""
    names = list_files(folder).keys() - manifest.files.keys()
    return sorted(name for name in names if not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    return Path(name).name.startswith(".")


def verify_files(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Read the bytes of part `share` of `shares` of the files, about equal in size, and compare their checksums.

    Raises CheckpointError naming every file of this part that is not as it was saved. A manifest without checksums, of
    before there were any, is let pass.
    """
    names = sorted(manifest.checksums, key=lambda name: (-manifest.files.get(name, 0), name))
    wrong = []
    for name in names[share::shares]:
        try:
            found = hash_file(folder / name)
        except OSError as error:
            wrong.append(f"{name} (cannot be read: {error})")
            continue
        if found != manifest.checksums[name]:
            wrong.append(f"{name} (checksum {found}, saved {manifest.checksums[name]})")
    if wrong:
        raise CheckpointError(
            f"{folder} is damaged: {', '.join(wrong)}. Fix: these files are not the ones that were saved; take an older "
            "checkpoint, or copy them again from where they came"
        )


def hash_file(path: Path) -> str:
    """128-bit xxh3 of a file, in hex."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
