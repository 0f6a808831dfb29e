"""JSON Lines, plain, gzip, zstd or bzip2: one object a line, one document an object, the text in one field. Other fields
are ignored, whatever they hold. Memory is bounded by the longest line.

A plain file larger than a unit is looked through for line ends when the units are made, at the speed of the disk, and
goes to several units. A compressed one cannot be entered in its midst and is one unit.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from stack.data.sources.base import Document, SourceRequest, Tally, Unit, group_files
from stack.data.sources.files import find_files
from stack.data.sources.records import RecordFiles

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSED = {
    ".gz": (b"\x1f\x8b", "gzip", "gunzip"),
    ".zst": (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    ".bz2": (b"BZh", "bzip2", "bunzip2"),
}
"""Endings of what is unpacked while it is read: its first bytes, none of which JSON begins with, and its name and tool."""

NAMES = tuple(f"{name}{packed}" for name in (".jsonl", ".ndjson") for packed in ("", *COMPRESSED))
"""How files of JSON Lines end; `.json` may be anything, and is read where a file or a pattern names it."""

BLOCK_BYTES = 1 << 20


class JsonLinesFiles(RecordFiles):
    """One document a line; the base of the sources of such files."""

    def units(self, size: int, cut: re.Pattern[str] | None, tally: Tally) -> list[Unit]:
        self.found.report(tally)
        large = [
            number
            for number, file in enumerate(self.files)
            if self.sizes[number] > size and file.path.suffix.lower() not in COMPRESSED
        ]
        return group_files(self.sizes, size, large, lambda number: self._divide(number, size, tally))

    def documents(self, unit: Unit, tally: Tally) -> Iterator[Document]:
        for file in self.files[unit.first : unit.last]:
            for number, line in _read_lines(file.path, unit, tally):
                record = _parse(line, where := f"{file.path}, line {number}", tally)
                if record is not None:
                    place = f"{file.place}:{number}"
                    document = self.reader.document(record, place, where, len(line), tally)
                    if document is not None:
                        yield document

    def _divide(self, number: int, size: int, tally: Tally) -> list[Unit]:
        """Units of one large file, cut at line ends."""
        path, cuts = self.files[number].path, [(0, 1)]
        offset, line = 0, 1
        try:
            if _is_packed(path, tally):
                return []
            with path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    if offset >= cuts[-1][0] + size and (at := block.find(b"\n") + 1):
                        cuts.append((offset + at, line + 1))
                    offset, line = offset + len(block), line + block.count(b"\n")
        except OSError as error:
            tally.fault("unreadable", str(path), self.sizes[number], f"cannot be read ({error.strerror})")
            return []
        ends = [*(begin for begin, _ in cuts[1:]), offset]
        return [
            Unit(number, number + 1, end - begin, begin, end, first_line)
            for (begin, first_line), end in zip(cuts, ends, strict=True)
            if end > begin
        ]


class JsonLinesSource(JsonLinesFiles):
    """`data.source=jsonl data.path=... data.text_field=text`"""

    def __init__(self, request: SourceRequest):
        super().__init__(request.data, "jsonl", find_files(request.data.path, "JSON Lines", NAMES))


def _parse(line: bytes, where: str, tally: Tally) -> object | None:
    """What a line spells, None if it was counted in `tally`."""
    size = len(line)
    if not line.strip():
        return tally.drop("blank line", where, size)
    cut = "" if line.endswith(b"\n") else "; the line has no end, the file may be cut off"
    try:
        record = json.loads(line.decode())  # not json.loads(bytes), which guesses the encoding
    except UnicodeDecodeError as error:
        byte = line[error.start]
        return tally.fault("not UTF-8", where, size, f"0x{byte:02X} is not UTF-8 ({error.reason})")
    except (ValueError, RecursionError) as error:  # Python refuses an integer of over 4,300 digits
        return tally.fault("not JSON", where, size, f"not JSON ({error}){cut}")
    return tally.fault("no record", where, size, "null in place of an object") if record is None else record


def _read_lines(path: Path, unit: Unit, tally: Tally) -> Iterator[tuple[int, bytes]]:
    """Lines of a file, or of a unit's part of it, with their number from 1, cut at line feeds only. A file that breaks
    off is one fault."""
    number, left = unit.line - 1, None if unit.end is None else unit.end - unit.begin
    try:
        if not unit.begin and _is_packed(path, tally):
            return
        with _open(path) as file:
            if unit.begin:
                file.seek(unit.begin)
            for number, line in enumerate(file, start=unit.line):
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if left is not None:
                    left -= len(line)
                    if left <= 0:
                        return
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = f"{path}, after line {number}"
        tally.fault("unreadable", where, 0, f"the rest of the file cannot be read ({reason})")


def _is_packed(path: Path, tally: Tally) -> bool:
    """Whether a file whose name says that it is plain begins as a compressed one; then it is one fault. Raises OSError."""
    if path.suffix.lower() in COMPRESSED:
        return False
    with path.open("rb") as file:
        begin = file.read(4)
    for ending, (magic, kind, tool) in COMPRESSED.items():
        if begin.startswith(magic):
            detail = f"it is compressed with {kind}, and its name does not end in {ending}"
            fix = f"rename it to {path.name}{ending}, which is read as it is, or unpack it then with {tool}"
            tally.fault("unreadable", str(path), path.stat().st_size, detail, fix=fix)
            return True
    return False


def _open(path: Path) -> IO[bytes] | gzip.GzipFile | bz2.BZ2File:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")
        case ".bz2":
            return bz2.open(path, "rb")
        case ".zst":
            return io.BufferedReader(_ZstdFile(path), BLOCK_BYTES)
        case _:
            return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """A file of zstd frames, unpacked. The library's own reader takes a file that breaks off for one that ends."""

    def __init__(self, path: Path):
        self._file = path.open("rb")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._packed = b""
        self._open, self._ready = False, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(BLOCK_BYTES // 4)
            if not self._packed:
                if self._open:
                    raise EOFError("the zstd frame breaks off")
                return 0
            self._open = True
            self._ready, self._packed = memoryview(self._unpack(self._packed)), b""
            if self._frame.eof:
                self._packed, self._open = self._frame.unused_data, False
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> bytes:
        try:
            return self._frame.decompress(packed)
        except zstandard.ZstdError as error:
            if "memory" not in str(error):
                raise
            raise zstandard.ZstdError(
                "packed with a window of over 128 MiB, which takes as much memory to unpack: pack it anew with zstd --long=27, "
                "or unpack it"
            ) from error

    def close(self) -> None:
        self._file.close()
        super().close()
