"""Ids that another tool made: a .bin with Megatron's .idx beside it, or alone, as nanoGPT and others write it.

They are taken as they are: nothing is put behind a document. A .bin without an index is parted by
`data.token_eos`; llm.c's header of 1,024 bytes is stepped over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from stack.data.megatron import MegatronIndex
from stack.data.sources.base import Document, SourceRequest, Tally, Unit
from stack.data.sources.files import (
    FileSource,
    SourceFile,
    check_unchanged,
    find_files,
    identify_files,
)

BLOCK_TOKENS = 1 << 20
LLM_C_MAGIC, LLM_C_HEADER = 20240520, 1024


class TokenFilesSource(FileSource):
    """`data.source=tokens data.path=... data.token_dtype=uint16 data.token_eos=50256`"""

    def __init__(self, request: SourceRequest):
        self.num_ids: int | None = request.vocab
        self.dtype, self.eos = request.data.token_dtype, request.data.token_eos
        super().__init__(find_files(request.data.path, "token", (".bin",), beside=(".idx",)))
        self.indexes = [_index_of(file) for file in self.files]

    def identity(self) -> object:
        indexes = [index for index in self.indexes if index]
        return ["tokens", self.num_ids, self.dtype, self.eos, identify_files([*self.files, *indexes])]

    def check_unchanged(self, unit: Unit | None = None) -> None:
        super().check_unchanged(unit)
        indexes = self.indexes if unit is None else self.indexes[unit.first : unit.last]
        check_unchanged(index for index in indexes if index)

    def units(self, size: int, cut: re.Pattern[str] | None, tally: Tally) -> list[Unit]:
        """Begin and end are documents of an indexed file, tokens of another."""
        self.found.report(tally)
        units: list[Unit] = []
        for number, index in enumerate(self.indexes):
            try:
                ends = self._plain_cuts(number, size) if index is None else _indexed_cuts(index.path, size)
            except (OSError, ValueError) as error:
                self._tell_unreadable(number, error, tally)
                continue
            begin = 0
            for end, weight in ends:
                units.append(Unit(number, number + 1, weight, begin, end))
                begin = end
        return units

    def documents(self, unit: Unit, tally: Tally) -> Iterator[Document]:
        index = self.indexes[unit.first]
        try:
            if index is None:
                yield from self._plain(unit)
            else:
                yield from self._indexed(unit, MegatronIndex(index.path), tally)
        except (OSError, ValueError) as error:
            self._tell_unreadable(unit.first, error, tally)

    def _tell_unreadable(self, number: int, error: Exception, tally: Tally) -> None:
        file = self.files[number]
        tally.fault("unreadable", str(file.path), file.size, f"cannot be read ({error})")

    def _indexed(self, unit: Unit, index: MegatronIndex, tally: Tally) -> Iterator[Document]:
        file, end = self.files[unit.first], index.num_documents if unit.end is None else unit.end
        tokens, width = np.memmap(file.path, mode="r"), index.dtype.itemsize
        for number in range(unit.begin, end):
            sequences = index.sequences(number)
            if not any(count for _, count in sequences):
                tally.drop("blank", f"{file.path}, document {number}", 0)
            elif any(at < 0 or at + count * width > len(tokens) for at, count in sequences):
                detail = f"it lies outside the {len(tokens):,} bytes of the file"
                tally.fault("not whole", f"{file.path}, document {number}", 0, detail)
            else:
                ids = [tokens[at : at + count * width].view(index.dtype) for at, count in sequences]
                count = sum(len(part) for part in ids)
                place, where = f"{file.place}:{number}", f"{file.path}, document {number}"
                yield Document(place, partial(_in_blocks, ids), where=where, num_bytes=count * width)

    def _plain(self, unit: Unit) -> Iterator[Document]:
        file, tokens = self.files[unit.first], self._map(unit.first)
        begin, end = unit.begin, len(tokens) if unit.end is None else unit.end
        while begin < end:
            behind = self._document_end(tokens, begin, end)
            place, where = f"{file.place}:{begin}", f"{file.path}, tokens {begin} to {behind - 1}"
            size = (behind - begin) * tokens.itemsize
            yield Document(place, partial(_in_blocks, [tokens[begin:behind]]), where=where, num_bytes=size)
            begin = behind

    def _map(self, number: int) -> np.ndarray:
        path, dtype = self.files[number].path, np.dtype(self.dtype).newbyteorder("<")
        with path.open("rb") as file:
            head = np.frombuffer(file.read(4), "<i4")
        skipped = LLM_C_HEADER if len(head) and head[0] == LLM_C_MAGIC else 0
        count, rest = divmod(path.stat().st_size - skipped, dtype.itemsize)
        if rest:
            raise ValueError(
                f"its size is no multiple of {dtype.itemsize} bytes, data.token_dtype={self.dtype}"
            )
        tokens = np.memmap(path, dtype, "r", skipped, (count,)) if count else np.zeros(0, dtype)
        begin = tokens[:BLOCK_TOKENS]
        # Of ids of 32 bits, every second half is the high one: below 4 for a vocabulary of up to 262,144.
        if dtype.itemsize == 2 and count >= 32 and begin[1::2].max() < 4 <= begin[::2].max():
            raise ValueError("its ids have 32 bits, not 16: every second is below 4; data.token_dtype=uint32")
        return tokens

    def _plain_cuts(self, number: int, size: int) -> list[tuple[int, int]]:
        """(end, bytes) of each unit: ends of documents."""
        tokens = self._map(number)
        width, cuts, begin = tokens.itemsize, [], 0
        while begin < len(tokens):
            at = min(begin + max(size // width, 1), len(tokens))
            end = self._document_end(tokens, at - 1, len(tokens))
            cuts.append((end, (end - begin) * width))
            begin = end
        return cuts

    def _document_end(self, tokens: np.ndarray, begin: int, end: int) -> int:
        """Place behind the first `eos` from `begin` on; `end` if there is none."""
        if self.eos is not None:
            for at in range(begin, end, BLOCK_TOKENS):
                found = np.flatnonzero(tokens[at : min(at + BLOCK_TOKENS, end)] == self.eos)
                if len(found):
                    return at + int(found[0]) + 1
        return end


def _index_of(file: SourceFile) -> SourceFile | None:
    path = file.path.with_suffix(".idx")
    if not path.exists():
        return None
    status = path.stat()
    return SourceFile(path, path.name, status.st_size, status.st_mtime_ns)


def _indexed_cuts(path: Path, size: int) -> list[tuple[int, int]]:
    """(end, bytes) of each unit of an indexed file."""
    index = MegatronIndex(path)
    totals = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[index.bounds]
    totals *= index.dtype.itemsize
    cuts, begin = [], 0
    while begin < index.num_documents:
        end = int(np.searchsorted(totals, totals[begin] + size, side="left"))
        end = min(max(end, begin + 1), index.num_documents)
        cuts.append((end, int(totals[end] - totals[begin])))
        begin = end
    return cuts


def _in_blocks(parts: list[np.ndarray]) -> Iterator[np.ndarray]:
    for part in parts:
        for begin in range(0, len(part), BLOCK_TOKENS):
            yield np.asarray(part[begin : begin + BLOCK_TOKENS], dtype=np.int64)
