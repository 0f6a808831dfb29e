"""A unit of the source through the tokenizer into its shard, in batches of bounded size. Runs in worker processes too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stack.config.schema_data import DataConfig
from stack.data import chunks
from stack.data.shards import ShardWriter, UnitRecord
from stack.data.sources import Document, Source, Tally, Unit
from stack.data.tokenizer import TextEncoder
from stack.errors import printable

BATCH_CHARS = 1 << 19
"""Text in one call of the tokenizer: about 0.15 M tokens, some 15 MB of memory while it works."""

Advance = Callable[[int, int], None]
"""Told the bytes of text and the tokens that were done since the last call."""


@dataclass(frozen=True)
class Recipe:
    """All that turns units into shards; it can travel to another process."""

    data: DataConfig
    source: Source
    encoder: TextEncoder | None
    """None for ids, which need no tokenizer, and for records of chats, which `data.format` renders."""

    tokenizer_path: str | None
    """Where the tokenizer of chats is."""

    num_ids: int
    """All ids are below this."""

    folder: Path
    """Of the store that is being made."""

    @property
    def eos_id(self) -> int | None:
        """Id that is put behind each document of text."""
        return self.encoder.eos_id if self.encoder is not None and self.data.append_eos else None


class ShardMaker:
    """Makes shards of units, one after the other."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self._chat = (
            _chat_encoder(recipe) if recipe.encoder is None and recipe.source.num_ids is None else None
        )

    def make(self, number: int, unit: Unit, advance: Advance) -> UnitRecord:
        """Unit -> shard `number`, complete or absent. Raises DataError, OSError."""
        recipe, tally = self.recipe, Tally(self.recipe.data.bad_text)
        writer = ShardWriter(recipe.folder, number, recipe.num_ids)
        try:
            documents = recipe.source.documents(unit, tally)
            if self._chat is not None:
                made = _write_chats(writer, documents, self._chat, tally, advance)
            elif recipe.encoder is not None:
                text = TextWriter(writer, recipe.encoder, recipe.eos_id, tally, advance)
                made = text.write(documents)
            else:
                made = _write_ids(writer, documents, tally, advance)
            recipe.source.check_unchanged(unit)  # before the shard has its name
            dropped = {reason: asdict(entry) for reason, entry in tally.dropped.items()}
            return writer.commit(dropped=dropped, **made)
        finally:
            writer.discard()


class TextWriter:
    """Writes texts as ids, each document followed by `eos_id` unless that is None."""

    def __init__(
        self, writer: ShardWriter, encoder: TextEncoder, eos_id: int | None, tally: Tally, advance: Advance
    ):
        self.writer, self.encoder, self.tally, self.advance = writer, encoder, tally, advance
        self.eos = None if eos_id is None else np.array([eos_id])
        self.text_bytes = 0
        self.num_control = 0
        self._text_hash = hashlib.sha256()
        self._control_ids = np.array(sorted(encoder.control_ids), dtype=np.int64)

    def write(self, documents: Iterable[Document]) -> dict[str, Any]:
        """What the unit's record says of the text."""
        batch: list[tuple[str, Document | None]] = []
        num_chars = 0
        for document in documents:
            if not is_cuttable(document, self.encoder.cut, self.tally):
                continue
            for chunk, last in _mark_last(self.encoder.chunks(text_blocks(document), place_of(document))):
                batch.append((chunk, document if last else None))
                num_chars += len(chunk)
                if num_chars >= BATCH_CHARS:
                    self._flush(batch)
                    batch, num_chars = [], 0
        self._flush(batch)
        text = self._text_hash.hexdigest()
        return {"text": text, "text_bytes": self.text_bytes, "num_control": self.num_control}

    def _flush(self, batch: list[tuple[str, Document | None]]) -> None:
        """batch: chunks, each with its document if it is the last one of it."""
        if not batch:
            return
        texts = [chunk for chunk, _ in batch]
        raw = "".join(texts).encode()
        self._text_hash.update(raw)
        self.text_bytes += len(raw)
        before = self.writer.num_tokens
        rows = self.encoder.encode(texts)
        for (_, document), ids in zip(batch, rows, strict=True):
            self.writer.append(ids)
            if document is not None and not document.goes_on:
                self._end_document(document.place)
        if len(self._control_ids):
            self.num_control += int(np.isin(np.concatenate(rows), self._control_ids).sum())
        self.advance(len(raw), self.writer.num_tokens - before)

    def _end_document(self, place: str) -> None:
        if self.writer.num_open_tokens == 0:  # a tokenizer that drops what it does not know can leave nothing
            self.tally.drop("no tokens", place, 0)
            return
        if self.eos is not None:
            self.writer.append(self.eos)
        self.writer.end_document(place)


def _write_ids(
    writer: ShardWriter, documents: Iterable[Document], tally: Tally, advance: Advance
) -> dict[str, Any]:
    """Documents of a source that makes ids."""
    for document in documents:
        if document.where and not _has_known_ids(document, writer.num_ids, tally):
            continue
        for ids in _id_blocks(document):
            writer.append(ids)
            advance(0, len(ids))
        writer.end_document(document.place)
    return {}


def _has_known_ids(document: Document, num_ids: int, tally: Tally) -> bool:
    """Whether the model knows all ids of a document from a file; else it goes to `tally`. Looked at before the first is
    written, so that a document is taken whole or not at all."""
    for ids in _id_blocks(document):
        if len(ids) and not 0 <= ids.min() <= ids.max() < num_ids:
            detail = (
                f"ids from {ids.min()} to {ids.max()}, expected 0 to {num_ids - 1}, the model's vocabulary: look at "
                "data.token_dtype, or use a model with a larger one"
            )
            tally.fault("ids that the model does not know", document.where, document.num_bytes, detail)
            return False
    return True


def _id_blocks(document: Document) -> Iterator[np.ndarray]:
    for ids in document.blocks():
        assert isinstance(ids, np.ndarray), "a source that makes ids gives arrays"
        yield ids


def _write_chats(
    writer: ShardWriter, documents: Iterable[Document], encoder: Any, tally: Tally, advance: Advance
) -> dict[str, Any]:
    """Records of `data.format`, with a mask of their targets."""
    from stack.data.chat.encode import BadRecord, Skipped

    num_bytes, remarks = 0, Tally()
    for document in documents:
        assert document.record is not None, "a source of records gives them whole"
        try:
            found = encoder.encode(document.record)
        except BadRecord as bad:
            tally.fault(bad.reason, document.where or document.place, document.num_bytes, bad.detail)
            continue
        if isinstance(found, Skipped):
            tally.drop(found.reason, document.where or document.place, document.num_bytes)
            continue
        writer.append(found.ids, found.targets)
        writer.end_document(document.place)
        for remark in found.remarks:
            remarks.drop(remark, document.where or document.place, document.num_bytes)
        num_bytes += document.num_bytes
        advance(document.num_bytes, len(found.ids))
    return {
        "text_bytes": num_bytes,
        "remarks": {what: asdict(entry) for what, entry in remarks.dropped.items()},
    }


def _chat_encoder(recipe: Recipe) -> Any:
    from stack.data.chat.encode import ChatEncoder  # brings transformers, which text does without

    assert recipe.tokenizer_path is not None
    return ChatEncoder(recipe.tokenizer_path, recipe.data)


def is_cuttable(document: Document, cut: re.Pattern[str] | None, tally: Tally) -> bool:
    """Whether a document of text has places to cut, or is short enough without; else it goes to `tally`. Read for it only
    if it is long. cut: as in `cut_text`."""
    if 0 < document.num_bytes <= chunks.MOST_CHARS:  # no character takes less than a byte
        return True
    stretches = chunks.Stretches(cut)
    for block in text_blocks(document):
        stretches.see(block)
        if stretches.too_long:
            tally.fault(chunks.UNCUTTABLE, place_of(document), document.num_bytes, stretches.explain())
            return False
    return True


def place_of(document: Document) -> str:
    """Of a document, for people."""
    return printable(document.where or document.place)


def text_blocks(document: Document) -> Iterator[str]:
    """Blocks of a document from a source of text."""
    for block in document.blocks():
        assert isinstance(block, str), "a source of text gives str"
        yield block


def _mark_last(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    held: str | None = None
    for chunk in chunks:
        if held is not None:
            yield held, False
        held = chunk
    if held is not None:
        yield held, True
