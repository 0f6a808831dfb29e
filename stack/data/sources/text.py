"""Plain text: a file, a folder or a shell pattern; one document a file, of any size, as it is.

Text is UTF-8 and is not changed: no normalisation, no newline translation. A file is read twice, in blocks:
once to see that all of it is text, so that a document is taken whole or not at all, and once for its content.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from stack.data.sources.base import Document, SourceRequest, Tally
from stack.data.sources.files import SourceFile, find_files, identify_files
from stack.errors import DataError

BLOCK_BYTES = 1 << 20


class TextSource:
    """`data.source=text data.path=...`"""

    num_ids = None

    def __init__(self, request: SourceRequest):
        self.files = find_files(request.data.path, "text")
        self.total_bytes = sum(file.path.stat().st_size for file in self.files)

    def identity(self) -> object:
        return ["text", identify_files(self.files)]

    def documents(self, tally: Tally) -> Iterator[Document]:
        return text_documents(self.files, tally)


class _NotUtf8(Exception):
    """The first byte of a file that is not UTF-8."""

    def __init__(self, offset: int, byte: int, reason: str):
        self.offset, self.byte, self.reason = offset, byte, reason


def text_documents(files: list[SourceFile], tally: Tally) -> Iterator[Document]:
    """One document a file; files that are blank, unreadable or not UTF-8 go to `tally`."""
    for file in files:
        size = file.path.stat().st_size
        try:
            blank = _is_blank(file.path)
        except _NotUtf8 as bad:
            where = f"{file.path}, line {_line_at(file.path, bad.offset)}, byte {bad.offset}"
            tally.fault("not UTF-8", where, size, f"0x{bad.byte:02X} is not UTF-8 ({bad.reason})")
        except OSError as error:
            tally.fault("unreadable", str(file.path), size, f"cannot be read ({error.strerror})")
        else:
            if blank:
                tally.drop("blank", str(file.path), size)
            else:
                yield Document(file.place, partial(_read_again, file.path))


def _is_blank(path: Path) -> bool:
    """Whether a file has no text but white space. Reads all of it; raises _NotUtf8."""
    blank = True
    for block in _decode_blocks(path):
        blank = blank and (not block or block.isspace())
    return blank


def _read_again(path: Path) -> Iterator[str]:
    try:
        yield from _decode_blocks(path)
    except _NotUtf8 as bad:
        raise DataError(
            f"{path} changed while it was read (byte {bad.offset}). Fix: start again when it is at rest"
        ) from bad


def _decode_blocks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    num_taken = 0
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK_BYTES)
            num_held = len(decoder.getstate()[0])  # bytes of a character that the end of the last block cut
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = num_taken - num_held + error.start
                raise _NotUtf8(offset, error.object[error.start], error.reason) from error
            if not block:
                return
            num_taken += len(block)


def _line_at(path: Path, offset: int) -> int:
    """Number of the line, from 1, that holds the byte at `offset`."""
    line, left = 1, offset
    with path.open("rb") as file:
        while left and (block := file.read(min(left, BLOCK_BYTES))):
            line, left = line + block.count(b"\n"), left - len(block)
    return line
