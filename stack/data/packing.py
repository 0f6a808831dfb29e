"""Documents of a store -> rows of `seq_len` tokens, computed from the documents' boundaries when a row is
asked for.

Every token of every document is in exactly one row, in the documents' order. Padding fills only what is left
of the last row (`concat`) or of each document's last row (`document`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from stack.data.batch import IGNORE, MicroBatch
from stack.data.store import TokenStore


class Piece(NamedTuple):
    """A stretch of one document in one row."""

    begin: int
    """Place of its first token in the store."""

    length: int
    goes_on: bool
    """Whether the document has a token behind it, which is then the target of its last position."""


class Rows(Protocol):
    """Rows over a choice of a store's documents."""

    num_tokens: int
    num_rows: int

    def pieces(self, row: int) -> list[Piece]:
        """What stands in a row, from left to right, `seq_len` tokens at most."""
        ...


class ConcatRows:
    """Documents joined end to end and cut every `seq_len` tokens; the last row is what is left."""

    def __init__(self, store: TokenStore, documents: np.ndarray, seq_len: int):
        self.offsets, self.documents, self.seq_len = store.offsets, documents, seq_len
        self.ends = np.cumsum(_lengths(store, documents))
        """Where each document ends in the joined stream, int64 [documents]."""

        self.num_tokens = int(self.ends[-1]) if len(documents) else 0
        self.num_rows = -(-self.num_tokens // seq_len)

    def pieces(self, row: int) -> list[Piece]:
        low = row * self.seq_len
        high = min(low + self.seq_len, self.num_tokens)
        first = int(np.searchsorted(self.ends, low, side="right"))
        last = int(np.searchsorted(self.ends, high, side="left"))
        found = []
        for index in range(first, last + 1):
            end = int(self.ends[index])
            start = int(self.ends[index - 1]) if index else 0
            cut_low, cut_high = max(low, start), min(high, end)
            begin = int(self.offsets[self.documents[index]]) + cut_low - start
            found.append(Piece(begin, cut_high - cut_low, cut_high < end))
        return found


class DocumentRows:
    """One document a row; a longer one takes several rows."""

    def __init__(self, store: TokenStore, documents: np.ndarray, seq_len: int):
        self.offsets, self.documents, self.seq_len = store.offsets, documents, seq_len
        lengths = _lengths(store, documents)
        self.row_ends = np.cumsum(-(-lengths // seq_len))
        """Rows up to and with each document, int64 [documents]."""

        self.num_tokens = int(lengths.sum())
        self.num_rows = int(self.row_ends[-1]) if len(documents) else 0

    def pieces(self, row: int) -> list[Piece]:
        index = int(np.searchsorted(self.row_ends, row, side="right"))
        document = self.documents[index]
        nth = row - (int(self.row_ends[index - 1]) if index else 0)
        begin, end = int(self.offsets[document]) + nth * self.seq_len, int(self.offsets[document + 1])
        length = min(self.seq_len, end - begin)
        return [Piece(begin, length, begin + length < end)]


PACKINGS: dict[str, Callable[[TokenStore, np.ndarray, int], Rows]] = {
    "concat": ConcatRows,
    "document": DocumentRows,
}


@dataclass(frozen=True)
class Account:
    """Where every token of a part went."""

    documents: int
    tokens: int
    rows: int
    targets: int
    """All tokens but the first of each document."""

    padding: int
    """Positions without a token."""

    def __str__(self) -> str:
        share = 100 * self.padding / max(self.tokens + self.padding, 1)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens in {self.rows:,} rows, {self.targets:,} targets, "
            f"{self.padding:,} positions of padding ({share:.2f} %), nothing dropped"
        )


class PackedPart:
    """The rows of one part (training or evaluation) of a store, as tensors."""

    def __init__(self, store: TokenStore, documents: np.ndarray, packing: str, seq_len: int):
        self.store, self.tokens, self.seq_len = store, store.tokens, seq_len
        self.pad_id = store.info.eos_id or 0
        self.rows = rows = PACKINGS[packing](store, documents, seq_len)
        self.num_rows = rows.num_rows
        num_positions = rows.num_rows * seq_len
        targets, padding = rows.num_tokens - len(documents), num_positions - rows.num_tokens
        self.account = Account(len(documents), rows.num_tokens, rows.num_rows, targets, padding)

    def micro_batch(self, rows: list[int], num_rows: int) -> MicroBatch:
        """The given rows, and rows of padding up to `num_rows`."""
        shape = (num_rows, self.seq_len)
        ids, labels = np.full(shape, self.pad_id, np.int64), np.full(shape, IGNORE, np.int64)
        positions = np.zeros(shape, np.int64)
        bounds, row_tokens = [0], []
        for index in range(num_rows):
            pieces = self.rows.pieces(rows[index]) if index < len(rows) else []
            begin = 0
            for piece in pieces:
                self._fill(piece, ids[index, begin:], labels[index, begin:])
                positions[index, begin : begin + piece.length] = np.arange(piece.length)
                begin += piece.length
                bounds.append(index * self.seq_len + begin)
            row_tokens.append(begin)
            if begin < self.seq_len:
                positions[index, begin:] = np.arange(self.seq_len - begin)
                bounds.append((index + 1) * self.seq_len)
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            row_tokens=tuple(row_tokens),
        )

    def describe_row(self, row: int) -> list[str]:
        """Which documents of the store stand in a row, and which of their tokens."""
        lines = []
        for piece in self.rows.pieces(row):
            document = int(np.searchsorted(self.store.offsets, piece.begin, side="right")) - 1
            first = piece.begin - int(self.store.offsets[document])
            lines.append(
                f"row {row}: document {document} of {self.store.info.source} ({self.store.folder}), tokens {first} to "
                f"{first + piece.length - 1}"
            )
        return lines

    def _fill(self, piece: Piece, ids: np.ndarray, labels: np.ndarray) -> None:
        """Tokens and targets of a piece into the start of a row's rest."""
        tokens = self.tokens[piece.begin : piece.begin + piece.length + piece.goes_on]
        ids[: piece.length] = tokens[: piece.length]
        labels[: len(tokens) - 1] = tokens[1:]


def _lengths(store: TokenStore, documents: np.ndarray) -> np.ndarray:
    """Tokens of each document, int64."""
    return np.asarray(store.offsets[documents + 1]) - np.asarray(store.offsets[documents])
