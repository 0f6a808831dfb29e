"""Writing a store: each unit of the source into a shard, complete or absent, and all shards into one index.

A finished shard has three files beside its ids: `units/NNNNN.npy`, the documents that end in it; `units/NNNNN.json`,
what `UnitRecord` says, which comes last and tells that all is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from stack.data.progress import Progress
from stack.data.store import (
    INFO,
    OFFSETS,
    PLACES,
    SHARDS,
    UNITS,
    StoreInfo,
    id_dtype,
    shard_path,
    targets_path,
)
from stack.errors import DataError

INDEX = np.dtype([("end", "<i8"), ("place", "<u8")])
"""A document that ends in a shard: the place behind its last token there, and the hash of its place in the source."""

BUFFER_TOKENS, HASH_BYTES = 1 << 16, 1 << 20


@dataclass
class UnitRecord:
    """What is known of a finished shard."""

    num_tokens: int
    num_documents: int
    """Documents that end in it."""

    masked: bool
    """Whether targets stand beside its ids."""

    text: str | None = None
    """SHA-256 over the text."""

    text_bytes: int = 0
    num_control: int = 0
    """Control tokens spelled out in the text."""

    dropped: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, Any] = field(default_factory=dict)
    """Of records that are in it, what is to be told: like `dropped`, count and first place by what it is."""


class ShardWriter:
    """Writes one shard, document by document; `commit` gives it its name."""

    def __init__(self, folder: Path, number: int, num_ids: int):
        """folder: of the store that is being made; its sub-folders are made here."""
        self.folder, self.number, self.num_ids, self.dtype = folder, number, num_ids, id_dtype(num_ids)
        self.num_tokens = 0
        for name in (SHARDS, UNITS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._files: dict[Path, IO[bytes]] = {}
        self._ids: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self._held = 0
        self._masked: bool | None = None
        self._ends: list[int] = []
        self._places: list[int] = []

    def append(self, ids: np.ndarray, targets: np.ndarray | None = None) -> None:
        """Add ids to the open document. targets: bool [len(ids)], which of them may be predicted; given with every call
        or with none. Raises DataError, here or later, if an id is not below `num_ids`."""
        if self._masked is None:
            self._masked = targets is not None
        if self._masked != (targets is not None) or (targets is not None and len(targets) != len(ids)):
            raise ValueError("targets go with every append or with none, one for each id")
        self._ids.append(ids)
        if targets is not None:
            self._targets.append(targets)
        self.num_tokens += len(ids)
        self._held += len(ids)
        if self._held >= BUFFER_TOKENS:
            self._flush()

    def end_document(self, place: str) -> None:
        """Close the open document; without ids it is none."""
        if self.num_open_tokens:
            self._ends.append(self.num_tokens)
            self._places.append(hash_place(place))

    @property
    def num_open_tokens(self) -> int:
        """Ids of the document that is not closed yet, in this shard."""
        return self.num_tokens - (self._ends[-1] if self._ends else 0)

    def commit(self, **fields: Any) -> UnitRecord:
        """Bring the shard to the disk and name it; `fields` are those of UnitRecord that the writer does not know."""
        self._flush()
        self._write(shard_path(self.folder, self.number), b"")  # an empty shard is a file too
        index = np.empty(len(self._ends), INDEX)
        index["end"], index["place"] = self._ends, self._places
        documents, done = unit_paths(self.folder, self.number)
        self._write(documents, index.tobytes())
        record = UnitRecord(self.num_tokens, len(self._ends), bool(self._masked), **fields)
        self._write(done, json.dumps(asdict(record)).encode())
        for path, file in self._files.items():  # the last one, which says that all are there, was opened last
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(file.name, path)
        return record

    def discard(self) -> None:
        """Close and delete what `commit` has not named."""
        for file in self._files.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._ids:
            return
        ids = np.concatenate(self._ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_ids:
            found, want = f"ids from {ids.min()} to {ids.max()}", f"0 to {self.num_ids - 1}"
            raise DataError(
                f"{found} in the source, expected {want}. Fix: use a model with a larger vocabulary"
            )
        self._write(shard_path(self.folder, self.number), ids.astype(self.dtype).tobytes())
        if self._targets:
            flags = np.concatenate(self._targets).astype(np.bool_)
            self._write(targets_path(self.folder, self.number), flags.tobytes())
        self._ids, self._targets, self._held = [], [], 0

    def _write(self, path: Path, content: bytes) -> None:
        if path not in self._files:
            # A name of its own: without locks, two processes may make the same shard, with the same content.
            part = path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.part")
            self._files[path] = part.open("wb")
        self._files[path].write(content)


class StoreWriter(ShardWriter):
    """A whole store of one shard, in an empty folder: for tests, and for what is small."""

    def __init__(self, folder: Path, num_ids: int):
        super().__init__(folder, 0, num_ids)

    def finish(self, **fields: Any) -> StoreInfo:
        """Name the shard, write index and info; `fields` are those of StoreInfo that the writer does not know."""
        record = self.commit()
        info = join_shards(self.folder, [record], num_ids=self.num_ids, **fields)
        shutil.rmtree(self.folder / UNITS)
        return info


def unit_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """Index of the documents that end in a shard, and its record, which says that the shard is whole."""
    return folder / UNITS / f"{number:05}.index", folder / UNITS / f"{number:05}.json"


def read_record(folder: Path, number: int) -> UnitRecord | None:
    """Record of a finished shard; None if it is not finished."""
    _, done = unit_paths(folder, number)
    return UnitRecord(**json.loads(done.read_text())) if done.exists() else None


def join_shards(folder: Path, records: Sequence[UnitRecord], *, num_ids: int, **fields: Any) -> StoreInfo:
    """Index over all shards, and the info, which comes last. Memory is bounded by the documents of one shard.

    All ids are read once more for their hash: at a GB/s, some hundredth of the time that making them took.
    """
    lengths = np.zeros(64, np.int64)
    start, last_end = 0, 0
    with (folder / OFFSETS).open("wb") as offsets, (folder / PLACES).open("wb") as places:
        offsets.write(np.zeros(1, "<i8").tobytes())
        for number, record in enumerate(records):
            index = np.fromfile(unit_paths(folder, number)[0], INDEX)
            ends = (index["end"] + start).astype("<i8")
            offsets.write(ends.tobytes())
            places.write(index["place"].tobytes())
            if len(ends):
                own = np.diff(ends, prepend=last_end)
                lengths += np.bincount(np.frexp(own)[1] - 1, minlength=64)
                last_end = int(ends[-1])
            start += record.num_tokens
    info = StoreInfo(
        dtype=id_dtype(num_ids),
        num_documents=sum(record.num_documents for record in records),
        num_tokens=start,
        shards=[record.num_tokens for record in records],
        content=_hash_content(folder, records),
        lengths=np.trim_zeros(lengths, "b").tolist(),
        masked=any(record.masked for record in records),
        num_ids=num_ids,
        **fields,
    )
    part = folder / f"{INFO}.part"
    part.write_text(json.dumps(asdict(info), indent=1))
    for path in (folder / OFFSETS, folder / PLACES, part):
        sync(path)
    os.replace(part, folder / INFO)
    return info


def _hash_content(folder: Path, records: Sequence[UnitRecord]) -> str:
    """SHA-256 over all ids, targets if there are any, and offsets, so that it does not tell how they lie in shards."""
    files = [shard_path(folder, number) for number in range(len(records))]
    files += [targets_path(folder, number) for number, record in enumerate(records) if record.masked]
    files.append(folder / OFFSETS)
    progress = Progress("checking what was written", sum(path.stat().st_size for path in files))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(HASH_BYTES):
                digest.update(block)
                progress.advance(len(block))
                progress.finish_unit(len(block))
    progress.close()
    return digest.hexdigest()


def hash_place(place: str) -> int:
    """64 bits that are the same on every machine."""
    return int.from_bytes(
        hashlib.blake2b(place.encode(errors="surrogateescape"), digest_size=8).digest(), "little"
    )


def sync(path: Path) -> None:
    """Bring a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
