"""What every source gives: documents in a fixed order, an identity known without reading, a count of what it
left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from stack.config.schema_data import DataConfig
from stack.errors import DataError


@dataclass(frozen=True)
class Document:
    """One document. `blocks` can be read more than once, and never holds more than a block where the format
    allows."""

    place: str
    """Where it stands, relative to the source's root: the same on every machine. Its hash decides train or
    eval part."""

    blocks: Callable[[], Iterator[str]] | Callable[[], Iterator[np.ndarray]]
    """Text cut anywhere, or arrays of ids for a source that needs no tokenizer."""


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

    def drop(self, reason: str, where: str, num_bytes: int) -> None:
        """Count a document without content: no fault, whatever the policy."""
        entry = self.dropped.setdefault(reason, Dropped(first=where))
        entry.count += 1
        entry.num_bytes += num_bytes

    def fault(self, reason: str, where: str, num_bytes: int, detail: str) -> None:
        """A document that cannot be read: raise DataError, or count it under `data.bad_text=skip`."""
        if self.policy == "stop":
            fix = "mend the file, or set data.bad_text=skip to leave out and count such documents"
            raise DataError(f"{where}: {detail}. Fix: {fix}")
        self.drop(reason, where, num_bytes)


@dataclass(frozen=True)
class SourceRequest:
    """What a source is made from."""

    data: DataConfig
    vocab: int
    """Ids that the model knows; used by sources that make ids."""

    seed: int


class Source(Protocol):
    """Documents of one kind. The constructor finds the files and raises ConfigError or DataError if there are
    none."""

    @property
    def num_ids(self) -> int | None:
        """None: blocks are text, for a tokenizer. Else blocks are ids, all below this."""
        ...

    @property
    def total_bytes(self) -> int:
        """Size of its files, for progress; 0 if unknown."""
        ...

    def identity(self) -> object:
        """All that decides the documents, as JSON: files with size and time, settings. Read without the
        text."""
        ...

    def documents(self, tally: Tally) -> Iterator[Document]:
        """The documents in a fixed order. Blank and unreadable ones go to `tally`."""
        ...
