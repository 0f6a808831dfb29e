"""One part of a store, training or evaluation, as rows with targets, and the account of where its tokens went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stack.config.schema_data import DataConfig
from stack.data.best_fit import BestFitRows, block_size
from stack.data.documents import BLOCK, NO_TARGET, SCAN_TOKENS, Documents, Dropped, count_targets
from stack.data.packing import ConcatRows, DocumentRows, Pieces, Rows
from stack.data.store import TokenStore


class Packing(NamedTuple):
    """How documents become rows."""

    rows: Callable[[Documents, int], Rows]
    block: Callable[[TokenStore, int], int]
    """Documents that are looked at together, for a store and a `seq_len`."""


PACKINGS = {
    "concat": Packing(ConcatRows, lambda store, seq_len: BLOCK),
    "best_fit": Packing(BestFitRows, block_size),
    "document": Packing(DocumentRows, lambda store, seq_len: BLOCK),
}


@dataclass(frozen=True)
class Account:
    """Where every token of a part went."""

    documents: int
    """In the rows."""

    tokens: int
    """In the rows."""

    rows: int
    targets: int
    """Tokens that are predicted: all that may be but the first of each document."""

    padding: int
    """Positions without a token."""

    cut: int = 0
    """Documents that lie in several rows."""

    dropped: tuple[str, ...] = ()
    """What was left out, a phrase for each reason."""

    def __str__(self) -> str:
        share = 100 * self.padding / max(self.tokens + self.padding, 1)
        return (
            f"{self.documents:,} documents ({self.cut:,} in several rows), {self.tokens:,} tokens in {self.rows:,} rows, "
            f"{self.targets:,} targets, {self.padding:,} positions of padding ({share:.2f} %), "
            + (f"dropped: {'; '.join(self.dropped)}" if self.dropped else "nothing dropped")
        )


class PackedPart:
    """The rows of one part of a store that have a target.

    Without a target mask every row is kept: only documents of one token have none then. With one, documents without a
    target are left out before rows are made, and then rows that hold only such stretches of a document.
    """

    def __init__(self, store: TokenStore, data: DataConfig, *, held_out: bool = False):
        """held_out: the documents for evaluation in place of those for training."""
        self.store, self.seq_len = store, data.seq_len
        self.pad_id = store.info.eos_id or 0
        packing = PACKINGS[data.packing]
        self.documents = Documents(
            store,
            held_out=held_out,
            eval_fraction=data.eval_fraction,
            longest=data.seq_len if data.too_long == "drop" else None,
            block=packing.block(store, data.seq_len),
        )
        self._rows = packing.rows(self.documents, data.seq_len)
        self._dropped_rows = Dropped()
        # A row of whole documents has the targets of its documents.
        cuts = self.documents.is_masked and (data.packing == "concat" or self._rows.num_cut() > 0)
        self._without = self._rows_without_target() if cuts else np.zeros(0, np.int64)
        self._kept_before = self._without - np.arange(len(self._without))
        self.num_rows = self._rows.num_rows - len(self._without)

    @property
    def num_tokens(self) -> int:
        """Tokens in the rows."""
        return self.documents.num_tokens - self._dropped_rows.tokens

    @cached_property
    def account(self) -> Account:
        """Reads the boundaries of all documents once."""
        dropped = [
            f"{each.count:,} documents {reason} ({each.tokens:,} tokens)"
            for reason, each in self.documents.dropped.items()
            if each.count
        ]
        if self._dropped_rows.count:
            dropped.append(
                f"{self._dropped_rows.count:,} rows {NO_TARGET} ({self._dropped_rows.tokens:,} tokens)"
            )
        return Account(
            self.documents.num_documents,
            self.num_tokens,
            self.num_rows,
            self.documents.num_targets,
            self.num_rows * self.seq_len - self.num_tokens,
            self._rows.num_cut(),
            tuple(dropped),
        )

    def pieces(self, row: int) -> Pieces:
        """What stands in a row."""
        kept = row + int(np.searchsorted(self._kept_before, row, side="right"))
        return self._rows.pieces(kept, kept + 1)

    def describe_row(self, row: int) -> list[str]:
        """Which documents of the store stand in a row, and which of their tokens."""
        pieces, lines = self.pieces(row), []
        for begin, length in zip(pieces.begins.tolist(), pieces.lengths.tolist(), strict=True):
            document = int(np.searchsorted(self.store.offsets, begin, side="right")) - 1
            first = begin - int(self.store.offsets[document])
            lines.append(
                f"row {row}: document {document} of {self.store.info.source} ({self.store.folder}), tokens {first} to "
                f"{first + length - 1}"
            )
        return lines

    def _rows_without_target(self) -> np.ndarray:
        """int64, in order. Reads the whole target mask."""
        found = [np.zeros(0, np.int64)]
        step = max(1, SCAN_TOKENS // self.seq_len)
        for first in range(0, self._rows.num_rows, step):
            pieces = self._rows.pieces(first, min(first + step, self._rows.num_rows))
            ordered = np.argsort(pieces.begins)
            begins = pieces.begins[ordered] + 1
            counts = count_targets(
                self.store, begins, begins + (pieces.lengths + pieces.goes_on)[ordered] - 1
            )
            rows = pieces.rows[ordered] - first
            targets = np.bincount(rows, counts)
            without = np.flatnonzero(targets == 0)
            self._dropped_rows.count += len(without)
            self._dropped_rows.tokens += int(np.bincount(rows, pieces.lengths[ordered])[without].sum())
            found.append(first + without)
        return np.concatenate(found)
