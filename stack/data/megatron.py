"""Megatron's indexed dataset: PREFIX.bin holds ids end to end, PREFIX.idx where each sequence lies.

The index, little-endian: the nine bytes of MAGIC; version 1 as uint64; code of the ids' number format as uint8; number
of sequences and of document bounds as uint64; sequence lengths as int32, their byte offsets in the .bin as int64, and
the document bounds, numbers of sequences from 0 to all of them, as int64. (Megatron-LM,
megatron/core/datasets/indexed_dataset.py)
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import numpy as np

from stack.data.store import TokenStore
from stack.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
BLOCK_DOCUMENTS = 1 << 20


class MegatronIndex:
    """The .idx of a pair, memory-mapped."""

    def __init__(self, path: Path):
        """Raises ValueError if it is none, OSError if it cannot be read."""
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise ValueError("no index of Megatron's")
        _, version, code, num_sequences, num_bounds = HEADER.unpack(head)
        if version != 1 or code not in DTYPES:
            raise ValueError(
                f"version {version} with number format {code}, expected 1 with one of {list(DTYPES)}"
            )
        need = HEADER.size + 12 * num_sequences + 8 * num_bounds
        if path.stat().st_size < need:
            raise ValueError(f"{path.stat().st_size} bytes, expected {need} for {num_sequences} sequences")
        self.dtype = np.dtype(DTYPES[code])
        raw = np.memmap(path, mode="r")

        def part(begin: int, count: int, dtype: str) -> np.ndarray:
            return raw[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)

        self.lengths = part(HEADER.size, num_sequences, "<i4")
        self.pointers = part(HEADER.size + 4 * num_sequences, num_sequences, "<i8")
        self.bounds = part(HEADER.size + 12 * num_sequences, num_bounds, "<i8")
        """Document d is the sequences bounds[d] to bounds[d + 1] - 1."""
        if num_sequences and self.lengths.min() < 0:
            raise ValueError("a sequence of negative length")
        self._check_bounds(num_sequences)

    def _check_bounds(self, num_sequences: int) -> None:
        """Raises ValueError unless each sequence is in one document, as Megatron's own reader asks."""
        if not len(self.bounds) and not num_sequences:
            return
        first, last = (int(self.bounds[0]), int(self.bounds[-1])) if len(self.bounds) else (0, 0)
        if (first, last) != (0, num_sequences):
            raise ValueError(
                f"document bounds from {first} to {last}, expected from 0 to {num_sequences}, its sequences"
            )
        if (np.diff(self.bounds) < 0).any():
            raise ValueError(f"document bounds from 0 to {num_sequences} that fall in between")

    @property
    def num_documents(self) -> int:
        return max(len(self.bounds) - 1, 0)

    @property
    def end(self) -> int:
        """Byte of the .bin behind the last that a sequence has."""
        sizes = self.lengths.astype(np.int64) * self.dtype.itemsize
        return int((self.pointers + sizes).max()) if len(sizes) else 0

    def sequences(self, document: int) -> list[tuple[int, int]]:
        """(byte offset, ids) of each sequence of a document."""
        span = slice(int(self.bounds[document]), int(self.bounds[document + 1]))
        return [(int(at), int(n)) for at, n in zip(self.pointers[span], self.lengths[span], strict=True)]


def export_megatron(store: TokenStore, folder: Path) -> Path:
    """Write a store as a pair of files that Megatron reads; the prefix of their names is given back.

    One document is one sequence. Whole or absent: the .idx comes last. Raises DataError.
    """
    prefix = folder / store.folder.name
    lengths = [np.diff(store.offsets[at : at + BLOCK_DOCUMENTS + 1]) for at in _blocks(store)]
    if max(int(block.max()) for block in lengths) >= 2**31:
        raise DataError(
            f"{store.folder}: a document of 2^31 tokens or more, which Megatron's index cannot hold"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_tokens(store, prefix.with_name(f"{prefix.name}.bin"))
        _write_index(store, lengths, prefix.with_name(f"{prefix.name}.idx"))
    except OSError as error:
        cause = error.strerror or error
        raise DataError(
            f"{prefix}: {cause}, while it was written. Fix: free some space, or choose a folder"
        ) from error
    return prefix


def _blocks(store: TokenStore) -> range:
    return range(0, store.num_documents, BLOCK_DOCUMENTS)


def _write_tokens(store: TokenStore, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as out:
        for shard in store.shard_files():
            with shard.open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    os.replace(part, path)


def _write_index(store: TokenStore, lengths: list[np.ndarray], path: Path) -> None:
    width = np.dtype(store.info.dtype).itemsize
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == np.dtype(store.info.dtype))
    count = store.num_documents
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as out:
        out.write(HEADER.pack(MAGIC, 1, code, count, count + 1))
        for block in lengths:
            out.write(block.astype("<i4").tobytes())
        for at in _blocks(store):
            out.write((store.offsets[at : min(at + BLOCK_DOCUMENTS, count)] * width).astype("<i8").tobytes())
        for at in range(0, count + 1, BLOCK_DOCUMENTS):
            out.write(np.arange(at, min(at + BLOCK_DOCUMENTS, count + 1), dtype="<i8").tobytes())
    os.replace(part, path)
