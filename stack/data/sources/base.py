"""What every source gives: documents in a fixed order, an identity known without reading, a count of what it
left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from stack.config.schema_data import DataConfig
from stack.errors import DataError, printable


@dataclass(frozen=True)
class Unit:
    """A stretch of a source that is prepared by itself, into one shard: where it stops depends on the source alone."""

    first: int
    """Number of its first item: a file, a shard of a dataset, or what else the source counts."""

    last: int
    """Number behind its last item."""

    size: int
    """How much work it is, in bytes of the source or whatever else all its units share; for progress."""

    begin: int = 0
    """Where it begins in its first item, in bytes, rows or documents; not 0 only for a part of one large item."""

    end: int | None = None
    """Where it ends in this item; None: at its end."""

    line: int = 1
    """Number of the line at `begin`, for files of lines."""


@dataclass(frozen=True)
class Document:
    """One document, or a unit's part of one. `blocks` can be read more than once, and never holds more than a block
    where the format allows."""

    place: str
    """Where it stands, relative to the source's root: the same on every machine. Its hash decides train or
    eval part."""

    blocks: Callable[[], Iterator[str]] | Callable[[], Iterator[np.ndarray]]
    """Text cut anywhere, or arrays of ids for a source that needs no tokenizer; nothing if there is a `record`."""

    record: dict[str, Any] | None = None
    """The whole record, for `data.format` other than text."""

    where: str = ""
    """Where the record stands, for people: file and line."""

    num_bytes: int = 0
    """Size of the record in the source, if known; for the count of what is left out."""

    goes_on: bool = False
    """Whether the next unit has more of it."""


@dataclass
class Dropped:
    """Documents left out for one reason."""

    count: int = 0
    num_bytes: int = 0
    first: str = ""
    """The first of them, with file and line."""


@dataclass
class Tally:
    """What a pass over a source left out, so that nothing is lost without a word."""

    policy: Literal["stop", "skip"] = "stop"
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def drop(self, reason: str, where: str, num_bytes: int, count: int = 1) -> None:
        """Count documents without content: no fault, whatever the policy."""
        entry = self.dropped.setdefault(reason, Dropped(first=printable(where)))
        entry.count += count
        entry.num_bytes += num_bytes

    def add(self, dropped: dict[str, Any]) -> None:
        """Count what a later stretch of the source left out, from its `dropped` as JSON."""
        for reason, entry in dropped.items():
            self.drop(reason, entry["first"], entry["num_bytes"], entry["count"])

    def fault(
        self,
        reason: str,
        where: str,
        num_bytes: int,
        detail: str,
        count: int = 1,
        fix: str = "mend the file",
    ) -> None:
        """A document that cannot be read, or `count` of them: raise DataError, or count it under
        `data.bad_text=skip`."""
        if self.policy == "stop":
            skip = "set data.bad_text=skip to leave out and count such documents"
            raise DataError(f"{where}: {detail}. Fix: {fix}, or {skip}")
        self.drop(reason, where, num_bytes, count)


@dataclass(frozen=True)
class SourceRequest:
    """What a source is made from."""

    data: DataConfig
    vocab: int
    """Ids that the model knows; used by sources that make ids."""

    seed: int


class Source(Protocol):
    """Documents of one kind; picklable, so that worker processes can have it. The constructor finds the files and raises
    ConfigError or DataError if there are none."""

    @property
    def num_ids(self) -> int | None:
        """None: blocks are text, for a tokenizer. Else blocks are ids, all below this."""
        ...

    @property
    def total_bytes(self) -> int:
        """Size of its files as they lie on the disk; 0 if unknown."""
        ...

    def identity(self) -> object:
        """All that decides the documents, as JSON: files with size and time, settings. Read without the
        text."""
        ...

    def units(self, size: int, cut: re.Pattern[str] | None, tally: Tally) -> list[Unit]:
        """The source cut into units of about `size` bytes, in order: the same cuts on every machine and for any number of
        workers. cut: in front of its matches a document of text may be cut (`chunks.safe_cut`); None: nowhere. What can
        only be judged as a whole goes to `tally` here: a document in several units, files that are passed over."""
        ...

    def documents(self, unit: Unit, tally: Tally) -> Iterator[Document]:
        """The documents of a unit in a fixed order. Blank and unreadable ones go to `tally`."""
        ...

    def check_unchanged(self, unit: Unit | None = None) -> None:
        """Raise DataError if a file of the unit, or any file, is no longer the one that `identity` names. Asked behind each
        reading, so that nothing made of a file that changed meanwhile is kept."""
        ...


def group_items(sizes: Sequence[int], size: int, first: int = 0) -> Iterator[Unit]:
    """Units of whole items, one after the other until `size` is reached."""
    begin, held = 0, 0
    for number, item in enumerate(sizes):
        held += item
        if held >= size or number == len(sizes) - 1:
            yield Unit(first + begin, first + number + 1, held)
            begin, held = number + 1, 0


def group_files(
    sizes: Sequence[int], size: int, large: Iterable[int], divide: Callable[[int], list[Unit]]
) -> list[Unit]:
    """Units of files in their order: whole ones together, and those numbered in `large` by `divide`."""
    units: list[Unit] = []
    start = 0
    for number in large:
        units += group_items(sizes[start:number], size, start)
        units += divide(number)
        start = number + 1
    return [*units, *group_items(sizes[start:], size, start)]


def all_documents(source: Source, tally: Tally) -> Iterator[Document]:
    """Every document of a source, each in one piece."""
    for unit in source.units(1 << 62, None, tally):
        yield from source.documents(unit, tally)
