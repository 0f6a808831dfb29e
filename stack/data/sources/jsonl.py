"""JSON Lines, plain or gzip: one object a line, one document an object, the text in one field. Other fields
are ignored, whatever they hold. Memory is bounded by the longest line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path

from stack.data.sources.base import Document, SourceRequest, Tally
from stack.data.sources.files import find_files, identify_files

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLinesSource:
    """`data.source=jsonl data.path=... data.text_field=text`"""

    num_ids = None

    def __init__(self, request: SourceRequest):
        self.field = request.data.text_field
        self.files = find_files(request.data.path, "JSON Lines", (".jsonl", ".jsonl.gz"))
        packed = any(file.path.suffix == ".gz" for file in self.files)
        self.total_bytes = 0 if packed else sum(file.path.stat().st_size for file in self.files)

    def identity(self) -> object:
        return ["jsonl", self.field, identify_files(self.files)]

    def documents(self, tally: Tally) -> Iterator[Document]:
        for file in self.files:
            for number, line in _read_lines(file.path, tally):
                text = self._read_text(line, f"{file.path}, line {number}", tally)
                if text is not None:
                    yield Document(f"{file.place}:{number}", partial(_one_block, text))

    def _read_text(self, line: bytes, where: str, tally: Tally) -> str | None:
        """The text of one line, or None if it was counted in `tally`."""
        size = len(line)
        if not line.strip():
            return tally.drop("blank line", where, size)
        cut = "" if line.endswith(b"\n") else "; the line has no end, the file may be cut off"
        try:
            record = json.loads(line.decode())  # not json.loads(bytes), which guesses the encoding
        except UnicodeDecodeError as error:
            return tally.fault(
                "not UTF-8", where, size, f"0x{line[error.start]:02X} is not UTF-8 ({error.reason})"
            )
        except (json.JSONDecodeError, RecursionError) as error:
            return tally.fault("not JSON", where, size, f"not JSON ({error}){cut}")
        if not isinstance(record, dict) or self.field not in record:
            found = (
                f"an object with {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
            )
            return tally.fault(
                "no text field", where, size, f"no field {self.field!r} (data.text_field) but {found:.200}"
            )
        text = record[self.field]
        if not isinstance(text, str):
            return tally.fault(
                "text field is no string", where, size, f"field {self.field!r} is {type(text).__name__}"
            )
        if not text or text.isspace():
            return tally.drop("blank", where, size)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
            code = ord(text[error.start])
            return tally.fault(
                "not Unicode", where, size, f"U+{code:04X} at character {error.start} is half a pair"
            )
        return text


def _read_lines(path: Path, tally: Tally) -> Iterator[tuple[int, bytes]]:
    """Lines with their number from 1, cut at line feeds only. A file that breaks off is one fault."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = f"{path}, after line {number}"
        tally.fault("unreadable", where, 0, f"the rest of the file cannot be read ({reason})")


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _one_block(text: str) -> Iterator[str]:
    yield text
