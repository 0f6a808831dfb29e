"""Files behind `data.path`: a file, a folder (all of it, recursively) or a shell pattern, in one order on every machine.

Links are followed, to folders too, but into no folder twice. What a folder holds and is not read is counted, by its kind,
so that nothing is passed over without a word.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from stack.data.sources.base import Dropped, Tally, Unit
from stack.errors import ConfigError, DataError, Fault

STORE_LOCK = re.compile(r"[a-z]+-[0-9a-f]{16}\.lock")
"""Name of the lock beside a token store (`prepare.py`)."""

MOST_KINDS = 20
"""Kinds of files passed over that are told apart."""

BROKEN_LINK = "link to nothing"
READ_ALREADY = "links to a folder that is gone through already, or that holds this one"


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was found."""

    path: Path
    place: str
    """Its path relative to the source's root, with `/`."""

    size: int
    """Bytes."""

    time_ns: int
    """When its content changed last, nanoseconds since 1970."""


@dataclass
class FoundFiles:
    """The files of a source in order of their places, and what lies beside them."""

    files: list[SourceFile] = field(default_factory=list)
    passed_over: Tally = field(default_factory=lambda: Tally("skip"))
    """What is not read, by its kind."""

    broken: Tally = field(default_factory=lambda: Tally("skip"))
    """What should be read and is not there."""

    def add(self, path: Path, root: Path) -> None:
        """Take a file in; what is none is counted."""
        try:
            status = path.stat()
        except OSError as error:  # also a loop of links, and a file deleted since its folder was read
            reason = BROKEN_LINK if path.is_symlink() else f"unreadable ({error.strerror})"
            return self.broken.drop(reason, str(path), 0)
        if not S_ISREG(status.st_mode):
            return self.passed_over.drop("neither file nor folder", str(path), 0)
        place = path.relative_to(root).as_posix()
        self.files.append(SourceFile(path, place, status.st_size, status.st_mtime_ns))
        return None

    def pass_over(self, path: Path) -> None:
        """Count a file of a kind that the source does not read."""
        suffix = path.suffix if path.suffix[1:].isalnum() and len(path.suffix) < 12 else "another name"
        known = self.passed_over.dropped
        reason = f"files that the source does not read ({suffix})"
        if reason not in known and len(known) >= MOST_KINDS:
            reason = "files that the source does not read (many kinds)"
        try:
            size = path.lstat().st_size
        except OSError:
            size = 0
        self.passed_over.drop(reason, str(path), size)

    def report(self, tally: Tally) -> None:
        """Hand over what is not read. Raises DataError for what should be read, unless `data.bad_text=skip`."""
        for reason, entry in self.broken.dropped.items():
            tally.fault(
                reason, entry.first, entry.num_bytes, f"{reason}, {entry.count:,} in all", entry.count
            )
        for reason, entry in self.passed_over.dropped.items():
            tally.drop(reason, entry.first, entry.num_bytes, entry.count)


class FileSource:
    """What all sources of files share."""

    def __init__(self, found: FoundFiles):
        self.found, self.files = found, found.files
        self.sizes = [file.size for file in self.files]
        self.total_bytes = sum(self.sizes)

    def check_unchanged(self, unit: Unit | None = None) -> None:
        check_unchanged(self.files if unit is None else self.files[unit.first : unit.last])


def check_unchanged(files: Iterable[SourceFile]) -> None:
    """Raise DataError for a file that is not as it was when it was found."""
    for file in files:
        try:
            status = file.path.stat()
            now = f"{status.st_size:,} bytes, {file.size:,} before"
            same = (status.st_size, status.st_mtime_ns) == (file.size, file.time_ns)
        except OSError as error:
            now, same = error.strerror or str(error), False
        if not same:
            raise DataError(
                f"{file.path}: changed while it was read ({now}). Fix: start again when the files are at rest; nothing made of "
                "the changed file was kept"
            )


def find_files(
    path: str | None, source: str, suffixes: tuple[str, ...] = (), beside: tuple[str, ...] = ()
) -> FoundFiles:
    """The files of `data.path`, ordered by place.

    A folder gives every file in it that is not hidden and, with `suffixes`, ends in one of them, in capitals or not; a
    pattern (`*`, `?`, `[...]`, `**` for any depth) gives what it matches. What preparation and runs write below the root is
    left out, and a token store as the root refused. beside: endings of files that belong to others and are not counted.
    Raises ConfigError without a path, DataError if nothing is there or a folder cannot be read.
    """
    if path is None:
        fix = "data.path=<file, folder or 'pattern'>, or data=stdlib for text that every machine has"
        raise ConfigError([Fault("data.path", None, f"where the {source} files are", fix)])
    given, found = Path(path).expanduser(), FoundFiles()
    root = given if given.is_dir() else given.parent if given.is_file() else _fixed_root(given)
    _refuse_store(path, root)
    if given.is_file():
        found.add(given, root)
    elif given.is_dir():
        for file in _walk(given, found):
            if not suffixes or file.name.lower().endswith(suffixes):
                found.add(file, root)
            elif not file.name.lower().endswith(beside):
                found.pass_over(file)
    else:
        for file in _match(given, root, found):
            found.add(file, root)
    if not found.files and not found.broken.dropped:
        raise DataError(_explain_nothing(path, given, suffixes, found.passed_over.dropped))
    found.files.sort(key=lambda file: os.fsencode(file.place))
    return found


def identify_files(files: list[SourceFile]) -> list[object]:
    """Place, size and time of change of each file: what tells, without reading, that the text is the same."""
    return [[file.place, file.size, file.time_ns] for file in files]


def _walk(root: Path, found: FoundFiles, hidden: bool = False) -> Iterator[Path]:
    """What is below a folder and is no folder. First all that needs no link, then what links lead to, so that a link gives
    no file another place; a folder that was read already, or that holds the root, is not entered."""
    seen, above = {_key(root)}, {_key(parent) for parent in [*root.resolve().parents]}
    tops = [root]
    while tops:
        links: list[Path] = []
        for top in tops:
            if top is not root and not _enter(top, seen, above, found):
                continue
            for parent, folders, names in os.walk(top, onerror=_refuse):
                names.sort(key=os.fsencode)  # so that the first of a kind is the same on every machine
                folders.sort(key=os.fsencode)
                inside = [Path(parent, name) for name in folders if _is_wanted(name, hidden, parent, found)]
                inside = [folder for folder in inside if not _is_ours(folder)]
                links += [folder for folder in inside if folder.is_symlink()]
                real = [folder for folder in inside if not folder.is_symlink()]
                folders[:] = [folder.name for folder in real if _enter(folder, seen, above, found)]
                files = (Path(parent, name) for name in names if _is_wanted(name, hidden, parent, found))
                yield from (file for file in files if not STORE_LOCK.fullmatch(file.name))
        tops = sorted(links, key=os.fsencode)


def _key(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _enter(folder: Path, seen: set[tuple[int, int]], above: set[tuple[int, int]], found: FoundFiles) -> bool:
    try:
        key = _key(folder)
    except OSError as error:
        _refuse(error)
        raise
    if key in seen or key in above:
        found.passed_over.drop(READ_ALREADY, str(folder), 0)
        return False
    seen.add(key)
    return True


def _is_wanted(name: str, hidden: bool, parent: str, found: FoundFiles) -> bool:
    if name.startswith(".") and not hidden:
        found.passed_over.drop("hidden files and folders", os.path.join(parent, name), 0)
        return False
    return True


def _refuse(error: OSError) -> None:
    fix = "mend its permissions, or leave it out with a pattern"
    raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}). Fix: {fix}") from error


def _is_store(folder: Path) -> bool:
    """Whether it is a token store, or one in the making."""
    return all((folder / name).exists() for name in ("store.json", "shards")) or (
        folder.suffix == ".partial" and (folder / "units").exists()
    )


def _is_ours(folder: Path) -> bool:
    """Whether it is a token store or the folder of a run."""
    marks = ({"config.yaml", "lock"}, {"config.yaml", "metrics.jsonl"})
    return _is_store(folder) or any(all((folder / name).exists() for name in names) for names in marks)


def _refuse_store(path: str, root: Path) -> None:
    if _is_store(root):
        raise DataError(
            f"data.path={path}: a token store, whose files are no documents. Fix: give the settings it was made with and "
            f"data.store={root.absolute().parent}, where it is then found; for its ids as files, launch/prepare.py with those "
            "settings and export=FOLDER, and data=tokens data.path=FOLDER"
        )


def _fixed_root(pattern: Path) -> Path:
    """The longest folder in front of the first wildcard."""
    parts = pattern.parts
    return Path(*parts[: next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))])


def _match(pattern: Path, root: Path, found: FoundFiles) -> list[Path]:
    """What a shell pattern matches below its fixed part."""
    parts = pattern.parts[len(root.parts) :]
    if "**" in parts:  # Python's own search follows a link in a circle
        hidden = any(part.startswith(".") for part in parts)
        walked = FoundFiles()
        below = _walk(root, walked, hidden) if root.is_dir() else iter(())
        matched = [path for path in below if _fits(path.relative_to(root).parts, parts)]
        if READ_ALREADY in walked.passed_over.dropped:
            found.passed_over.dropped[READ_ALREADY] = walked.passed_over.dropped[READ_ALREADY]
        return matched
    matched = sorted((Path(name) for name in glob.glob(str(pattern))), key=os.fsencode)
    depth = len(root.parts)
    ours = {
        parent for parent in {parent for path in matched for parent in [path, *path.parents]}
        if len(parent.parts) > depth and _is_ours(parent)
    }  # fmt: skip
    kept = []
    for path in matched:
        if ours.intersection([path, *path.parents]) or STORE_LOCK.fullmatch(path.name):
            continue
        if path.is_dir():
            found.passed_over.drop("folders that the pattern names and does not enter", str(path), 0)
        else:
            kept.append(path)
    return kept


def _fits(names: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether the names on the way to a file are what the parts of a pattern say."""
    if not names or not parts:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return _fits(names, parts[1:]) or (not names[0].startswith(".") and _fits(names[1:], parts))
    shown = parts[0].startswith(".") or not names[0].startswith(".")
    return shown and fnmatch.fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])


def _explain_nothing(path: str, given: Path, suffixes: tuple[str, ...], others: dict[str, Dropped]) -> str:
    if given.is_dir():
        kinds = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        there = "; ".join(f"{what}: {entry.count:,}, first {entry.first}" for what, entry in others.items())
        held = f", but {there:.500}" if there else ""
        fix = "point data.path at files, or use a pattern, which takes any name"
        return f"data.path={path}: the folder holds no file{kinds}{held}. Fix: {fix}"
    if glob.has_magic(path):
        return f"data.path={path}: the pattern matches no file. Fix: quote it on the command line, and use ** for any depth"
    return (
        f"data.path={path}: there is no such file or folder (looked in {Path.cwd()}). Fix: correct the path; relative "
        "paths start where the command was started"
    )
