"""Files behind `data.path`: a file, a folder (all of it, recursively) or a shell pattern, in one order on
every machine."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stack.errors import ConfigError, DataError, Fault

STORE_LOCK = re.compile(r"[a-z]+-[0-9a-f]{16}\.lock")
"""Name of the lock beside a token store (`prepare.py`)."""


@dataclass(frozen=True)
class SourceFile:
    """A file and its place: the path relative to the source's root, with `/`."""

    path: Path
    place: str


def find_files(path: str | None, source: str, suffixes: tuple[str, ...] = ()) -> list[SourceFile]:
    """The files of `data.path`, ordered by place.

    A folder gives every file in it that is not hidden and, with `suffixes`, ends in one of them; a pattern
    (`*`, `?`, `[...]`, `**` for any depth) gives what it matches. What preparation and runs write below the root is left
    out. Raises ConfigError without a path, DataError if nothing is there or a folder cannot be read.
    """
    if path is None:
        fix = "data.path=<file, folder or 'pattern'>, or data=stdlib for text that every machine has"
        raise ConfigError([Fault("data.path", None, f"where the {source} files are", fix)])
    given = Path(path).expanduser()
    if given.is_file():
        found, root = [given], given.parent
    elif given.is_dir():
        found, root = [file for file in _walk(given) if not suffixes or file.name.endswith(suffixes)], given
    else:
        found, root = _match(str(given))
    if not found:
        raise DataError(_explain_nothing(path, given, suffixes))
    return sorted(
        (SourceFile(file, file.relative_to(root).as_posix()) for file in found),
        key=lambda file: os.fsencode(file.place),
    )


def identify_files(files: list[SourceFile]) -> list[object]:
    """Place, size and time of change of each file: what tells, without reading, that the text is the same."""
    return [
        [file.place, status.st_size, status.st_mtime_ns] for file in files for status in [file.path.stat()]
    ]


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not _is_ours(Path(parent, name))
        ]
        files = (Path(parent, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file() and not STORE_LOCK.fullmatch(file.name))


def _refuse(error: OSError) -> None:
    fix = "mend its permissions, or leave it out with a pattern"
    raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}). Fix: {fix}") from error


def _is_ours(folder: Path) -> bool:
    """Whether it is a token store, one in the making, or the folder of a run."""
    marks = ({"store.json", "shards"}, {"config.yaml", "lock"}, {"config.yaml", "metrics.jsonl"})
    return any(all((folder / name).exists() for name in names) for names in marks) or (
        folder.suffix == ".partial" and (folder / "units").exists()
    )


def _match(pattern: str) -> tuple[list[Path], Path]:
    """Files that a shell pattern matches, and the longest folder in front of its first wildcard."""
    parts = Path(pattern).parts
    fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = Path(*parts[:fixed])
    found = [Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
    depth = len(root.parts)
    ours = {
        parent for parent in {parent for file in found for parent in file.parents}
        if len(parent.parts) > depth and _is_ours(parent)
    }  # fmt: skip
    return [
        file for file in found if not ours.intersection(file.parents) and not STORE_LOCK.fullmatch(file.name)
    ], root


def _explain_nothing(path: str, given: Path, suffixes: tuple[str, ...]) -> str:
    kinds = f" that ends in {' or '.join(suffixes)}" if suffixes and given.is_dir() else ""
    if given.is_dir():
        return f"data.path={path}: the folder holds no file{kinds}. Fix: point data.path at files, or use a pattern"
    if glob.has_magic(path):
        return f"data.path={path}: the pattern matches no file. Fix: quote it on the command line, and use ** for any depth"
    return (
        f"data.path={path}: there is no such file or folder (looked in {Path.cwd()}). Fix: correct the path; relative "
        "paths start where the command was started"
    )
