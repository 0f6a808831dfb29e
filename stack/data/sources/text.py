"""Plain text: a file, a folder or a shell pattern; one document a file, of any size, as it is.

Text is UTF-8 and is not changed: no normalisation, no newline translation. A file is read twice, in blocks:
once to see that all of it is text, so that a document is taken whole or not at all, and once for its content.
A file larger than a unit is seen through when the units are made, and goes to several of them, cut where the ids of
the parts, joined, are those of the whole.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from stack.data.chunks import UNCUTTABLE, Stretches
from stack.data.sources.base import Document, SourceRequest, Tally, Unit, group_files
from stack.data.sources.files import FileSource, SourceFile, find_files, identify_files
from stack.errors import DataError

BLOCK_BYTES = 1 << 20


class TextFiles(FileSource):
    """One document a file; the base of the sources of text files."""

    num_ids = None

    def units(self, size: int, cut: re.Pattern[str] | None, tally: Tally) -> list[Unit]:
        self.found.report(tally)
        if cut is None:
            return group_files(self.sizes, size, [], lambda _: [])
        large = [number for number, own in enumerate(self.sizes) if own > size]
        return group_files(self.sizes, size, large, lambda number: self._divide(number, size, cut, tally))

    def documents(self, unit: Unit, tally: Tally) -> Iterator[Document]:
        if unit.end is None:
            return text_documents(self.files[unit.first : unit.last], tally)
        file = self.files[unit.first]
        blocks = partial(_read_again, file.path, unit.begin, unit.end)
        goes_on = unit.end < self.sizes[unit.first]
        size = unit.end - unit.begin
        return iter([Document(file.place, blocks, where=str(file.path), num_bytes=size, goes_on=goes_on)])

    def _divide(self, number: int, size: int, cut: re.Pattern[str], tally: Tally) -> list[Unit]:
        """Units of one large file, if it is good."""
        path, total = self.files[number].path, self.sizes[number]
        cuts, stretches = [0], Stretches(cut)

        def note_cuts(offset: int, text: str) -> None:
            """The first safe place of a block behind each multiple of `size`."""
            stretches.see(text)
            if offset >= cuts[-1] + size and (found := cut.search(text)):
                cuts.append(offset + len(text[: found.start()].encode()))

        if not _is_good(path, total, tally, note_cuts):
            return []
        if stretches.too_long:
            tally.fault(UNCUTTABLE, str(path), total, stretches.explain())
            return []
        return [
            Unit(number, number + 1, end - begin, begin, end)
            for begin, end in zip(cuts, [*cuts[1:], total], strict=True)
        ]


class TextSource(TextFiles):
    """`data.source=text data.path=...`"""

    def __init__(self, request: SourceRequest):
        super().__init__(find_files(request.data.path, "text"))

    def identity(self) -> object:
        return ["text", identify_files(self.files)]


class _NotUtf8(Exception):
    """The first byte of a file that is not UTF-8."""

    def __init__(self, offset: int, byte: int, reason: str):
        self.offset, self.byte, self.reason = offset, byte, reason


def text_documents(files: list[SourceFile], tally: Tally) -> Iterator[Document]:
    """One document a file; files that are blank, unreadable or not UTF-8 go to `tally`."""
    for file in files:
        if _is_good(file.path, file.size, tally):
            blocks = partial(_read_again, file.path)
            yield Document(file.place, blocks, where=str(file.path), num_bytes=file.size)


def _is_good(path: Path, size: int, tally: Tally, see: Callable[[int, str], None] = lambda *_: None) -> bool:
    """Whether a file is a document: readable, UTF-8, with more than white space. Else it goes to `tally`.

    see: shown the whole text, block by block, with the byte offset of each.
    """
    blank = True
    try:
        for offset, block in _decode_blocks(path):
            blank = blank and (not block or block.isspace())
            see(offset, block)
    except _NotUtf8 as bad:
        where = f"{path}, line {_line_at(path, bad.offset)}, byte {bad.offset}"
        tally.fault("not UTF-8", where, size, f"0x{bad.byte:02X} is not UTF-8 ({bad.reason})")
        return False
    except OSError as error:
        tally.fault("unreadable", str(path), size, f"cannot be read ({error.strerror})")
        return False
    if blank:
        tally.drop("blank", str(path), size)
    return not blank


def _read_again(path: Path, begin: int = 0, end: int | None = None) -> Iterator[str]:
    try:
        yield from (block for _, block in _decode_blocks(path, begin, end))
    except _NotUtf8 as bad:
        detail = f"changed while it was read (byte {bad.offset}). Fix: start again when it is at rest"
        raise DataError(f"{path}: {detail}") from bad
    except OSError as error:  # a part of it may be in the shard already
        detail = f"could be read once, and not again ({error.strerror}). Fix: start again when it is at rest"
        raise DataError(f"{path}: {detail}") from error


def _decode_blocks(path: Path, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, str]]:
    """Text of the bytes [begin, end), in blocks, each with the offset of its first byte."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    taken = begin
    with path.open("rb") as file:
        file.seek(begin)
        while True:
            block = file.read(BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - taken))
            offset = taken - len(decoder.getstate()[0])  # bytes of a character that the last block cut
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _NotUtf8(offset + error.start, error.object[error.start], error.reason) from error
            yield offset, text
            if not block:
                return
            taken += len(block)


def _line_at(path: Path, offset: int) -> int:
    """Number of the line, from 1, that holds the byte at `offset`."""
    line, left = 1, offset
    with path.open("rb") as file:
        while left and (block := file.read(min(left, BLOCK_BYTES))):
            line, left = line + block.count(b"\n"), left - len(block)
    return line
