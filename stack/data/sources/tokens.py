"""Ids that another tool made: a .bin with Megatron's .idx beside it, or alone, as nanoGPT and others write it.

They are taken as they are: nothing is put behind a document. A .bin without an index is parted by
`data.token_eos`; llm.c's header of 1,024 bytes is stepped over. What its begin shows to be something else, such as ids of
more bits, is refused.
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
NUMPY_MAGIC = b"\x93NUMPY"

LLM_C_MAGICS = {20240520: "uint16", 20240801: "uint32"}
"""Number format of the ids by what a file of llm.c begins with: GPT-2's and Llama 3's. (llm.c, dev/data/data_common.py)"""

LLM_C_HEADER = 1024
"""Bytes: 256 int32, of which the first is the magic and the third the number of ids."""

LEAST_IDS = 16
"""Ids from which on their true width is looked for; half of them must be large enough to show it."""


class _Misread(ValueError):
    """A file that is not what the settings say."""

    def __init__(self, detail: str, fix: str):
        super().__init__(detail)
        self.fix = fix


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
                if index is None:
                    ends = self._plain_cuts(number, size)
                else:
                    opened = MegatronIndex(index.path)
                    self._tell_uncovered(number, opened, tally)
                    ends = _indexed_cuts(opened, size)
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
        of_pair = self.indexes[number] is not None and isinstance(error, ValueError)
        fix = "make its .idx anew, with the tool that wrote the pair" if of_pair else "mend the file"
        fix = getattr(error, "fix", fix)
        tally.fault("unreadable", str(file.path), file.size, f"cannot be read ({error})", fix=fix)

    def _tell_uncovered(self, number: int, index: MegatronIndex, tally: Tally) -> None:
        """Bytes behind what the index names: the pair is of two makings, or the index is unfinished."""
        file, end = self.files[number], index.end
        if end < file.size:
            detail = f"it has {file.size:,} bytes, and its .idx names the first {end:,} alone"
            fix = "make the .idx anew, or cut the .bin"
            tally.fault("not in the index", str(file.path), file.size - end, detail, fix=fix)

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
            head = file.read(12)
        if head.startswith(NUMPY_MAGIC):
            raise _Misread(
                "an array saved by numpy, whose header would become ids", _conversion(path, "load")
            )
        size = path.stat().st_size
        skipped = _llm_c_header(head, size, self.dtype)
        count, rest = divmod(size - skipped, dtype.itemsize)
        if rest:
            detail = (
                f"its size, {size:,}, is no multiple of {dtype.itemsize} bytes, data.token_dtype={self.dtype}"
            )
            raise _Misread(detail, "set data.token_dtype to what it was written with, or mend the file")
        tokens = np.memmap(path, dtype, "r", skipped, (count,)) if count else np.zeros(0, dtype)
        _check_width(path, tokens[:BLOCK_TOKENS])
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


def _llm_c_header(head: bytes, size: int, dtype: str) -> int:
    """Bytes of llm.c's header at the begin of a file; 0 if it has none. Raises ValueError if the file is not as it says."""
    magic, _, count = np.frombuffer(head.ljust(12, b"\0"), "<i4").tolist()
    if (written := LLM_C_MAGICS.get(magic)) is None:
        return 0
    if size < LLM_C_HEADER:
        cut = f"{size:,} bytes, where llm.c's header alone has {LLM_C_HEADER:,}: it breaks off"
        raise _Misread(cut, "copy or make the file anew")
    width = np.dtype(written).itemsize
    if np.dtype(dtype).itemsize != width:
        detail = f"data.token_dtype={dtype}, expected {written}, which llm.c's magic {magic} stands for"
        raise _Misread(detail, f"set data.token_dtype={written}")
    if size != (need := LLM_C_HEADER + count * width):
        raise _Misread(
            f"{size:,} bytes, expected {need:,} for the {count:,} ids of llm.c's header",
            "copy or make the file anew",
        )
    return LLM_C_HEADER


def _check_width(path: Path, begin: np.ndarray) -> None:
    """Raises ValueError if ids of more bits were written than are read."""
    bits = 8 * begin.itemsize
    if _are_parts(begin, 64 // bits):
        high = "every second is 0" if bits == 32 else "of each four the last two are 0"
        raise _Misread(f"its ids have 64 bits, not {bits}: {high}", _conversion(path, "fromfile", "'int64'"))
    if bits == 16 and _are_parts(begin, 2):
        raise _Misread("its ids have 32 bits, not 16: every second is below 4", "set data.token_dtype=uint32")


def _are_parts(begin: np.ndarray, each: int) -> bool:
    """Whether numbers look like ids that were written as `each` of them, the lowest first. Above the low 16 bits an id is
    below 4 for a vocabulary of up to 262,144, above the low 32 it is 0. That some ids are large keeps padding, and a
    vocabulary of few ids, from being taken for it."""
    least = 4 if begin.itemsize == 2 else 1
    ids = begin[: len(begin) // each * each].reshape(-1, each)
    if len(ids) < LEAST_IDS or (ids[:, 1] >= least).any() or ids[:, 2:].any():
        return False
    return int((ids[:, 0] >= least).sum()) >= LEAST_IDS // 2


def _conversion(path: Path, reader: str, *arguments: str) -> str:
    """How a file becomes one that can be read."""
    read = f"numpy.{reader}({', '.join([repr(path.name), *arguments])})"
    made = f"{path.stem}-uint32.bin"
    return f"convert it with {read}.astype('uint32').tofile({made!r}), and set data.token_dtype=uint32"


def _index_of(file: SourceFile) -> SourceFile | None:
    path = file.path.with_suffix(".idx")
    if not path.exists():
        return None
    status = path.stat()
    return SourceFile(path, path.name, status.st_size, status.st_mtime_ns)


def _indexed_cuts(index: MegatronIndex, size: int) -> list[tuple[int, int]]:
    """(end, bytes) of each unit of an indexed file."""
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
