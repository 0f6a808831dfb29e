"""Documents through the tokenizer into a store, in batches of bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from stack.data.progress import Progress
from stack.data.sources import Document, Tally
from stack.data.store import StoreWriter
from stack.data.tokenizer import TextEncoder

BATCH_CHARS = 1 << 21
"""Text in one call of the tokenizer: about 0.6 M tokens, some 60 MB of memory while it works."""


class TextWriter:
    """Writes texts as ids, each document followed by `eos_id` unless that is None."""

    def __init__(
        self, writer: StoreWriter, encoder: TextEncoder, eos_id: int | None, tally: Tally, progress: Progress
    ):
        self.writer = writer
        self.encoder = encoder
        self.eos = None if eos_id is None else np.array([eos_id])
        self.tally = tally
        self.progress = progress
        self.text_bytes = 0
        self.num_control = 0
        """Control tokens spelled out in the text."""

        self._text_hash = hashlib.sha256()
        self._control_ids = np.array(sorted(encoder.control_ids), dtype=np.int64)

    def write(self, documents: Iterable[Document]) -> None:
        batch: list[tuple[str, str | None]] = []
        num_chars = 0
        for document in documents:
            for chunk, place in _mark_last(self.encoder.chunks(text_blocks(document)), document.place):
                batch.append((chunk, place))
                num_chars += len(chunk)
                if num_chars >= BATCH_CHARS:
                    self._flush(batch)
                    batch, num_chars = [], 0
        self._flush(batch)

    def _flush(self, batch: list[tuple[str, str | None]]) -> None:
        """batch: chunks, each with the place of its document if it is the last one of it."""
        for (chunk, place), ids in zip(
            batch, self.encoder.encode([chunk for chunk, _ in batch]), strict=True
        ):
            raw = chunk.encode()
            self._text_hash.update(raw)
            self.text_bytes += len(raw)
            self.num_control += int(np.isin(ids, self._control_ids).sum())
            self.writer.append(ids)
            if place is not None:
                self._end_document(place)
            self.progress.advance(len(raw), len(ids))

    @property
    def text_hash(self) -> str:
        """SHA-256 of all text written so far."""
        return self._text_hash.hexdigest()

    def notes(self) -> list[str]:
        """What the user should know of how the text became ids."""
        notes = self.encoder.notes()
        if self.num_control:
            notes.append(
                f"{self.num_control:,} control tokens are spelled out in the text and were read as such"
            )
        return notes

    def _end_document(self, place: str) -> None:
        if self.writer.num_open_tokens == 0:  # a tokenizer that drops what it does not know can leave nothing
            self.tally.drop("no tokens", place, 0)
            return
        if self.eos is not None:
            self.writer.append(self.eos)
        self.writer.end_document(place)


def write_ids(writer: StoreWriter, documents: Iterable[Document], progress: Progress) -> None:
    """Documents of a source that makes ids."""
    for document in documents:
        for ids in document.blocks():
            assert isinstance(ids, np.ndarray), "a source that makes ids gives arrays"
            writer.append(ids)
            progress.advance(0, len(ids))
        writer.end_document(document.place)


def text_blocks(document: Document) -> Iterator[str]:
    """Blocks of a document from a source of text."""
    for block in document.blocks():
        assert isinstance(block, str), "a source of text gives str"
        yield block


def _mark_last(chunks: Iterable[str], place: str) -> Iterator[tuple[str, str | None]]:
    held: str | None = None
    for chunk in chunks:
        if held is not None:
            yield held, None
        held = chunk
    if held is not None:
        yield held, place
