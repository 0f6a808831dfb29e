"""The token store: the ids of all documents in memory-mapped shards, with one index of the documents' boundaries.

A store is a folder:

    shards/00000.bin       ids end to end, little-endian uint16, or int32 where the vocabulary needs it
    shards/00000.targets   bool, one a token: may it be predicted? Only where some may not, as in chats
    offsets.bin            int64 [num_documents + 1]: document d is the tokens offsets[d] to offsets[d + 1] - 1 of the
                           whole store, over the bounds of shards
    places.bin             uint64 [num_documents]: hash of each document's place in its source
    store.json             StoreInfo: what it was made from, counts, hashes
    tokenizer/             Hugging Face folder, if the tokenizer was trained on this text

Why a format of our own: Arrow files of `datasets` and the shards of mosaicml-streaming and litdata keep documents or
samples, so that a rank which wants a slice of one packed row reads and copies more than the slice, while .bin files of
datatrove and Megatron hold bare ids, but no document that spans files, no mask of targets, and no record of what made
them. So a shard holds the bytes of a Megatron .bin, both ways are open by `sources/tokens.py` and `megatron.py`, and
what is added is one global index.

While it is made, `units/` holds what is known of each finished shard, and the folder has another name until all of it
is there, so a folder with the right name is whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from stack.errors import DataError

FORMAT = 2
SHARDS, UNITS = "shards", "units"
OFFSETS, PLACES, INFO = "offsets.bin", "places.bin", "store.json"
TOKENIZER = "tokenizer"
OPEN_SHARDS = 64
"""Shards mapped at once; each map takes one of the process's file descriptors."""


@dataclass
class StoreInfo:
    """What a store holds and what it was made from."""

    source: str
    dtype: str
    """numpy name of the ids in the shards."""

    num_documents: int
    num_tokens: int
    shards: list[int]
    """Tokens of each shard."""

    content: str
    """SHA-256 over ids, targets and boundaries: the same for the same tokens, whatever they were made from, and where."""

    text: str | None
    """SHA-256 over the documents' UTF-8 bytes; None if the source made ids or records."""

    text_bytes: int
    """UTF-8 bytes of the text that became ids, or bytes of the records."""

    tokenizer: str | None
    """Where its tokenizer is: TOKENIZER for the folder inside, else a path or hub name; None if there is
    none."""

    eos_id: int | None
    """Id behind each document, None if none was put there."""

    num_ids: int
    """All ids are below this."""

    lengths: list[int] = field(default_factory=list)
    """Documents by length: entry k counts those of 2^k to 2^(k + 1) - 1 tokens."""

    dropped: dict[str, Any] = field(default_factory=dict)
    """Documents left out: reason -> count, bytes and the first one's place."""

    notes: list[str] = field(default_factory=list)
    """What else the user should know of how the text became ids."""

    tokenizer_hash: str | None = None
    """Of all that decides the tokenizer's ids (`TextEncoder.fingerprint`); None if the source made ids."""

    masked: bool = False
    """Whether only some tokens may be predicted."""

    format: int = FORMAT


class TokenStore:
    """A complete store, read through memory maps. Opening it reads store.json and looks at the sizes of files; 10
    million documents open in milliseconds."""

    def __init__(self, folder: Path):
        """Raises DataError if the folder is no whole store."""
        self.folder = folder
        try:
            fields = json.loads((folder / INFO).read_text())
            if fields.get("format") != FORMAT:
                raise DataError(
                    _damaged(folder, f"format {fields.get('format')}, this version reads {FORMAT}")
                )
            self.info = StoreInfo(**fields)
            self.offsets = _map(folder / OFFSETS, "<i8", self.info.num_documents + 1)
            self.places = _map(folder / PLACES, "<u8", self.info.num_documents)
            _check_sizes(folder, self.info)
        except (OSError, ValueError, TypeError, AttributeError) as error:  # JSON may spell a list too
            raise DataError(_damaged(folder, str(error))) from error
        self._starts = np.concatenate([[0], np.cumsum(self.info.shards, dtype=np.int64)])
        self._map_ids = lru_cache(OPEN_SHARDS)(self._map_shard)
        self._map_targets = lru_cache(OPEN_SHARDS)(self._map_mask)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        """Travels to another process by its folder: maps do not."""
        return type(self), (self.folder,)

    @property
    def num_documents(self) -> int:
        return self.info.num_documents

    @property
    def num_tokens(self) -> int:
        return self.info.num_tokens

    def read(self, begin: int, end: int) -> np.ndarray:
        """Ids of the tokens [begin, end) of the whole store, a copy, int64 [end - begin]."""
        spans = self._spans(begin, end)
        out = np.empty(end - begin, np.int64)
        for shard, inside, outside in spans:
            out[outside] = self._map_ids(shard)[inside]
        return out

    def read_targets(self, begin: int, end: int) -> np.ndarray | None:
        """Which of the tokens [begin, end) may be predicted, a copy, bool [end - begin]; None: all of them may."""
        if not self.info.masked:
            return None
        spans = self._spans(begin, end)
        out = np.empty(end - begin, np.bool_)
        for shard, inside, outside in spans:
            out[outside] = self._map_targets(shard)[inside]
        return out

    def shard_files(self) -> list[Path]:
        """Files of ids, in order."""
        return [shard_path(self.folder, number) for number in range(len(self.info.shards))]

    @property
    def trained_tokenizer(self) -> str | None:
        """Folder of the tokenizer that was trained on this text; None if it is the model's or there is none."""
        inside = self.folder / TOKENIZER
        # The model's own may be in a folder of the same name beside the run.
        return str(inside) if self.info.tokenizer == TOKENIZER and inside.is_dir() else None

    @property
    def tokenizer(self) -> str | None:
        """Folder or hub name of the tokenizer, None if there is none."""
        return self.trained_tokenizer or self.info.tokenizer

    def _spans(self, begin: int, end: int) -> list[tuple[int, slice, slice]]:
        """(shard, where in it, where in the result) of each shard that [begin, end) touches."""
        if not 0 <= begin <= end <= self.num_tokens:
            raise IndexError(f"tokens {begin} to {end} of a store of {self.num_tokens}")
        shard = int(np.searchsorted(self._starts, begin, side="right")) - 1
        at, spans = begin, []
        while at < end:
            start, stop = int(self._starts[shard]), min(int(self._starts[shard + 1]), end)
            if stop > at:  # a shard may be empty
                spans.append((shard, slice(at - start, stop - start), slice(at - begin, stop - begin)))
            at, shard = stop, shard + 1
        return spans

    def _map_shard(self, shard: int) -> np.ndarray:
        return self._map_file(shard_path(self.folder, shard), self.info.dtype, shard)

    def _map_mask(self, shard: int) -> np.ndarray:
        return self._map_file(targets_path(self.folder, shard), "?", shard)

    def _map_file(self, path: Path, dtype: str, shard: int) -> np.ndarray:
        try:
            return _map(path, dtype, self.info.shards[shard])
        except (OSError, ValueError) as error:
            raise DataError(_damaged(self.folder, str(error))) from error


def shard_path(folder: Path, number: int) -> Path:
    return folder / SHARDS / f"{number:05}.bin"


def targets_path(folder: Path, number: int) -> Path:
    return folder / SHARDS / f"{number:05}.targets"


def id_dtype(num_ids: int) -> str:
    """numpy name of the smallest number format that holds ids below `num_ids` and that Megatron knows."""
    return "<u2" if num_ids <= 1 << 16 else "<i4"


def _check_sizes(folder: Path, info: StoreInfo) -> None:
    """Refuse a store whose shards are not all there. Raises ValueError."""
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder / SHARDS)}
    width = np.dtype(info.dtype).itemsize
    for number, count in enumerate(info.shards):
        wanted = [(shard_path(folder, number).name, count * width)]
        if info.masked and count:
            wanted.append((targets_path(folder, number).name, count))
        for name, want in wanted:
            if sizes.get(name) != want:
                raise ValueError(f"{SHARDS}/{name} has {sizes.get(name, 'no')} bytes, not {want}")


def _map(path: Path, dtype: str, length: int) -> np.ndarray:
    want, got = length * np.dtype(dtype).itemsize, path.stat().st_size
    if want != got:
        raise ValueError(f"{path.name} has {got} bytes, not {want}")
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,)) if length else np.zeros(0, dtype)


def _damaged(folder: Path, detail: str) -> str:
    return f"{folder}: no whole token store ({detail}). Fix: delete the folder and prepare it again with launch/prepare.py"
