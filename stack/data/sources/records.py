"""What sources of records share: which part of a record is the document, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from stack.config.schema_data import DataConfig
from stack.data.sources.base import Document, Tally
from stack.data.sources.files import FileSource, FoundFiles, identify_files


class RecordReader:
    """One document a record: the text of one field, or for `data.format` other than text the whole of it."""

    def __init__(self, data: DataConfig):
        self.field = data.text_field
        self.whole = data.format != "text"

    @property
    def identity(self) -> list[object]:
        """What decides which part of a record is read."""
        return ["record"] if self.whole else ["text", self.field]

    def document(self, record: Any, place: str, where: str, size: int, tally: Tally) -> Document | None:
        """place: relative to the source, where: for people. None if the record was counted in `tally`."""
        if not isinstance(record, dict):
            return tally.fault("no record", where, size, f"expected an object, found {type(record).__name__}")
        if self.whole:
            return Document(place, partial(iter, ()), record, where, size)
        if self.field not in record:
            found = ", ".join(map(str, record))
            return tally.fault(
                "no text field",
                where,
                size,
                f"no field {self.field!r} (data.text_field) but an object with {found:.200}",
            )
        text = self._check(record[self.field], where, size, tally)
        return (
            None if text is None else Document(place, partial(_one_block, text), where=where, num_bytes=size)
        )

    def _check(self, text: Any, where: str, size: int, tally: Tally) -> str | None:
        if not isinstance(text, str):
            return tally.fault(
                "text field is no string", where, size, f"field {self.field!r} is {type(text).__name__}"
            )
        if not text or text.isspace():
            return tally.drop("blank", where, size)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
                code = ord(text[error.start])
                return tally.fault(
                    "not Unicode", where, size, f"U+{code:04X} at character {error.start} is half a pair"
                )
        return text


def _one_block(text: str) -> Iterator[str]:
    yield text


class RecordFiles(FileSource):
    """Files of records; the base of the sources of one format."""

    num_ids = None

    def __init__(self, data: DataConfig, kind: str, found: FoundFiles, choice: Sequence[object] = ()):
        """kind, choice: of the identity; what the files were chosen by, where that says more than they do."""
        super().__init__(found)
        self.reader, self.kind, self.choice = RecordReader(data), kind, list(choice)

    def identity(self) -> object:
        return [self.kind, self.reader.identity, *self.choice, identify_files(self.files)]
