"""A look at the first documents as the model will see them: text, ids, and which tokens are learned. Nothing is prepared."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TextIO

import numpy as np

from stack.config.schema_data import DataConfig
from stack.data.encode import text_blocks
from stack.data.prepare import mixture_parts
from stack.data.sources import SOURCES, Document, Source, SourceRequest, Tally
from stack.data.sources.base import all_documents
from stack.data.tokenizer import TextEncoder, load_tokenizer, train_tokenizer
from stack.errors import ConfigError, Fault, printable

ROW_TOKENS = 8
"""Tokens in a row of the display; a line feed in the text ends a row before."""

HEAD_ROWS, TAIL_ROWS = 30, 10
"""What is shown of a long document."""

TEXT_CHARS = 20_000
"""Of a document of plain text, of which the first part tells enough."""

TRAINING_CHARS = 1_000_000
"""Text that a stand-in is trained on where the run's tokenizer is yet to be trained."""

LEARNED, CONTEXT, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class Sample:
    """A document as tokens."""

    place: str
    ids: np.ndarray
    targets: np.ndarray
    """bool [tokens]."""

    cut: bool = False
    """Whether only its beginning was read."""

    remarks: tuple[str, ...] = ()
    """What its user may not have meant. Each continues `a record ...`."""


def read_count(text: str) -> int:
    """Of `preview=3`. Raises ConfigError."""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError([Fault("preview", text, "a number of documents from 1", "preview=3")])
    return int(text)


def show_preview(
    data: DataConfig, count: int, *, tokenizer_path: str | None, model_vocab: int | None, seed: int,
    out: TextIO | None = None,
) -> None:  # fmt: skip
    """Print the first `count` documents of each part of the data. Raises DataError, ConfigError.

    Learned tokens are green and the others dim, or learned ones stand between ⟦ and ⟧ where `out` is no terminal or
    NO_COLOR is set.
    """
    stream = out or sys.stdout
    colours = stream.isatty() and not os.environ.get("NO_COLOR")
    for part in mixture_parts(data):
        source = SOURCES[part.source](SourceRequest(part, model_vocab or part.vocab_size, seed))
        tally = Tally(part.bad_text)
        tokenizer, samples = _open(part, source, tally, tokenizer_path, stream)
        number = 0
        for number, sample in enumerate(islice(samples, count), start=1):
            kept, learned = len(sample.ids), int(sample.targets.sum())
            head = f"document {number} of {part.name}, {printable(sample.place)}: "
            head += f"its first {kept:,} tokens" if sample.cut else f"{kept:,} tokens, {learned:,} learned"
            print(f"═══ {head}", file=stream)
            for row in _rows(sample, tokenizer, colours):
                print(row, file=stream)
            for remark in sample.remarks:
                print(f"note: a record {remark}", file=stream)
        print(f"═══ {number} documents shown; {_legend(colours)}", file=stream)
        for reason, entry in tally.dropped.items():
            print(
                f"left out before the last one, {reason}: {entry.count:,}, first {entry.first}", file=stream
            )


def _open(
    data: DataConfig, source: Source, tally: Tally, tokenizer_path: str | None, out: TextIO
) -> tuple[Any, Iterator[Sample]]:
    """The tokenizer, None for ids without one, and the samples."""
    documents = all_documents(source, tally)
    if source.num_ids is not None:
        known = data.source != "random" and tokenizer_path
        return load_tokenizer(tokenizer_path) if known and tokenizer_path else None, _ids(documents)
    if not data.train_tokenizer and tokenizer_path is None:
        fix = "model.tokenizer=<folder or hub name>, or data.train_tokenizer=true"
        raise ConfigError([Fault("model.tokenizer", None, "a tokenizer to look at the data with", fix)])
    if data.format != "text":
        from stack.data.chat.encode import ChatEncoder  # brings Jinja, which text does without

        assert tokenizer_path is not None, "the settings are checked: chats come with a tokenizer"
        encoder = ChatEncoder(tokenizer_path, data)
        for note in encoder.notes():
            print(f"note: {note}", file=out)
        return encoder.text.tokenizer, _chats(documents, encoder, tally)
    if data.train_tokenizer:
        print(
            "note: ids are of a stand-in, trained on the first MB of text; the run trains its own on all of it",
            file=out,
        )
        tokenizer = train_tokenizer(_beginning(source, data), data.vocab_size)
    else:
        assert tokenizer_path is not None
        tokenizer = load_tokenizer(tokenizer_path)
    return tokenizer, _texts(documents, TextEncoder(tokenizer), data.append_eos)


def _chats(documents: Iterator[Document], encoder: Any, tally: Tally) -> Iterator[Sample]:
    from stack.data.chat.encode import BadRecord, Skipped

    for document in documents:
        assert document.record is not None, "a source of records gives them whole"
        where = document.where or document.place
        try:
            found = encoder.encode(document.record)
        except BadRecord as bad:
            tally.fault(bad.reason, where, document.num_bytes, bad.detail)
            continue
        if isinstance(found, Skipped):
            tally.drop(found.reason, where, document.num_bytes)
        else:
            yield Sample(document.place, found.ids, found.targets, remarks=found.remarks)


def _texts(documents: Iterator[Document], encoder: TextEncoder, append_eos: bool) -> Iterator[Sample]:
    for document in documents:
        text, whole = _take(text_blocks(document), TEXT_CHARS)
        (ids,) = encoder.encode([text])
        if whole and append_eos and encoder.eos_id is not None:
            ids = np.append(ids, encoder.eos_id)
        yield Sample(document.place, ids, _all_but_first(len(ids)), cut=not whole)


def _ids(documents: Iterator[Document]) -> Iterator[Sample]:
    for document in documents:
        ids = np.concatenate([np.asarray(block) for block in document.blocks()])
        yield Sample(document.place, ids, _all_but_first(len(ids)))


def _all_but_first(count: int) -> np.ndarray:
    """Nothing comes before the first token that could predict it."""
    return np.arange(count) > 0


def _take(blocks: Iterator[str], limit: int) -> tuple[str, bool]:
    """The first characters of a text, and whether that is all of it."""
    taken, size = [], 0
    for block in blocks:
        taken.append(block)
        size += len(block)
        if size > limit:
            return "".join(taken)[:limit], False
    return "".join(taken), True


def _beginning(source: Source, data: DataConfig) -> Iterator[str]:
    left = TRAINING_CHARS
    for document in all_documents(source, Tally(data.bad_text)):
        text, _ = _take(text_blocks(document), left)
        yield text
        left -= len(text)
        if left <= 0:
            return


def _rows(sample: Sample, tokenizer: Any, colours: bool) -> Iterator[str]:
    """Lines of the display, with what is left out of a long document said in its middle."""
    count, room = len(sample.ids), (HEAD_ROWS + TAIL_ROWS) * ROW_TOKENS
    stretches = (
        [(0, count)]
        if count <= room
        else [(0, HEAD_ROWS * ROW_TOKENS), (count - TAIL_ROWS * ROW_TOKENS, count)]
    )
    behind = 0
    for begin, end in stretches:
        if begin > behind:
            learned = int(sample.targets[behind:begin].sum())
            yield f"{'...':>8}  {begin - behind:,} tokens, {learned:,} of them learned"
        behind = end
        for first, pieces in _group(sample, tokenizer, begin, end):
            ids = " ".join(str(token) for ids, _, _ in pieces for token in ids)
            yield f"{first:>8}  {ids:<{ROW_TOKENS * 7}} │ {_text(pieces, colours)}".rstrip()


Piece = tuple[list[int], str, bool]
"""Tokens that make up whole characters, their text, and whether they are learned."""


def _group(sample: Sample, tokenizer: Any, begin: int, end: int) -> Iterator[tuple[int, list[Piece]]]:
    """Rows of pieces, each with the number of its first token."""
    pieces: list[Piece] = []
    first, held = begin, 0
    for ids, text, learned in _pieces(sample, tokenizer, begin, end):
        pieces.append((ids, text, learned))
        held += len(ids)
        if held >= ROW_TOKENS or text.endswith("\n"):
            yield first, pieces
            first, held, pieces = first + held, 0, []
    if pieces:
        yield first, pieces


def _pieces(sample: Sample, tokenizer: Any, begin: int, end: int) -> Iterator[Piece]:
    held: list[int] = []
    for place in range(begin, end):
        held.append(int(sample.ids[place]))
        text = "" if tokenizer is None else tokenizer.decode(held, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(held) < 6 and place + 1 < end:
            continue  # a token that ends within a character
        yield held, text, bool(sample.targets[place])
        held = []


def _text(pieces: list[Piece], colours: bool) -> str:
    shown, before = [], None
    for _, text, learned in pieces:
        if learned != before:
            if colours:
                shown.append(f"{PLAIN}{LEARNED if learned else CONTEXT}")
            elif learned or before:
                shown.append("⟦" if learned else "⟧")
            before = learned
        shown.append("".join(VISIBLE.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in text))
    if colours:
        return "".join([*shown, PLAIN])
    return "".join([*shown, "⟧" if before else ""])


def _legend(colours: bool) -> str:
    if colours:
        return f"{LEARNED}learned{PLAIN}, {CONTEXT}not learned{PLAIN}"
    return "⟦learned⟧, the rest is context"
