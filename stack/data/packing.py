"""Documents -> rows of `seq_len` tokens, computed from the documents' boundaries when a row is asked for.

Two packings that keep the documents' order: joined end to end (`ConcatRows`) or one a row (`DocumentRows`); the third,
which fills rows with whole short documents, is in `best_fit.py`. Each token of each document is in exactly one row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from stack.data.documents import Documents


class Pieces(NamedTuple):
    """Stretches of documents in rows, row by row and from left to right; each field is an array [pieces]."""

    rows: np.ndarray
    """Row of each piece, int64, in order."""

    begins: np.ndarray
    """Place of its first token in the store, int64."""

    lengths: np.ndarray
    goes_on: np.ndarray
    """Whether the document has a token behind the piece, which is then the target of its last position, bool."""


class Rows(Protocol):
    """Rows over the documents of a part."""

    num_rows: int

    def pieces(self, first: int, last: int) -> Pieces:
        """What stands in the rows [first, last), `seq_len` tokens at most in each."""
        ...

    def num_cut(self) -> int:
        """Documents that lie in several rows. Reads all boundaries."""
        ...


class ConcatRows:
    """Documents joined end to end and cut every `seq_len` tokens; the last row is what is left."""

    def __init__(self, documents: Documents, seq_len: int):
        self.documents, self.seq_len = documents, seq_len
        self.num_rows = -(-documents.num_tokens // seq_len)

    def pieces(self, first: int, last: int) -> Pieces:
        low, high = first * self.seq_len, min(last * self.seq_len, self.documents.num_tokens)
        ahead = self.documents.block_tokens
        nearest = int(np.searchsorted(ahead, low, side="right")) - 1
        blocks = [
            self.documents.block(i) for i in range(nearest, int(np.searchsorted(ahead, high, side="left")))
        ]
        begins, lengths = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        ends = ahead[nearest] + np.cumsum(lengths)  # in the joined stream
        starts = ends - lengths
        inside = slice(
            int(np.searchsorted(ends, low, side="right")), int(np.searchsorted(starts, high, side="left"))
        )
        begins, starts, ends = begins[inside], starts[inside], ends[inside]
        edges = np.union1d(np.maximum(starts, low), np.arange(low, high, self.seq_len))
        lengths = np.diff(edges, append=high)
        document = np.searchsorted(ends, edges, side="right")
        at = begins[document] + edges - starts[document]
        return Pieces(edges // self.seq_len, at, lengths, edges + lengths < ends[document])

    def num_cut(self) -> int:
        count, ahead = 0, 0
        for _, lengths in self.documents.blocks():
            ends = ahead + np.cumsum(lengths)
            count += int(np.count_nonzero((ends - lengths) // self.seq_len != (ends - 1) // self.seq_len))
            ahead += int(lengths.sum())
        return count


class DocumentRows:
    """One document a row; a longer one takes several rows."""

    def __init__(self, documents: Documents, seq_len: int):
        self.documents, self.seq_len = documents, seq_len
        totals = [int(-(-lengths // seq_len).sum()) for _, lengths in documents.blocks()]
        self.block_rows = np.cumsum([0, *totals])
        """Rows ahead of each block, and of all."""

        self.num_rows = int(self.block_rows[-1])

    def pieces(self, first: int, last: int) -> Pieces:
        return join(
            self._in_block(index, rows) for index, rows in rows_by_block(self.block_rows, first, last)
        )

    def _in_block(self, index: int, rows: np.ndarray) -> Pieces:
        begins, lengths = self.documents.block(index)
        found = cut_documents(
            rows - self.block_rows[index], begins, lengths, -(-lengths // self.seq_len), self.seq_len
        )
        return found._replace(rows=rows)

    def num_cut(self) -> int:
        return count_longer(self.documents, self.seq_len)


def cut_documents(
    rows: np.ndarray, begins: np.ndarray, lengths: np.ndarray, counts: np.ndarray, seq_len: int
) -> Pieces:
    """Rows that hold one piece of one document each. begins, lengths, counts: of the documents, `counts` the rows that each
    one takes, its first tokens in its first."""
    ends = np.cumsum(counts)
    document = np.searchsorted(ends, rows, side="right")
    at = (rows - ends[document] + counts[document]) * seq_len
    taken = np.minimum(seq_len, lengths[document] - at)
    return Pieces(rows, begins[document] + at, taken, at + taken < lengths[document])


def rows_by_block(block_rows: np.ndarray, first: int, last: int) -> list[tuple[int, np.ndarray]]:
    """The rows [first, last), in arrays of those that stand in the same block. block_rows: rows ahead of each block."""
    nearest = int(np.searchsorted(block_rows, first, side="right")) - 1
    found = []
    while first < last:
        end = min(last, int(block_rows[nearest + 1]))
        if end > first:
            found.append((nearest, np.arange(first, end)))
        first, nearest = max(first, end), nearest + 1
    return found


def join(parts: Iterable[Pieces]) -> Pieces:
    """Pieces of several stretches of rows as one."""
    return Pieces(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def count_longer(documents: Documents, seq_len: int) -> int:
    """Documents with more than `seq_len` tokens."""
    return sum(int(np.count_nonzero(lengths > seq_len)) for _, lengths in documents.blocks())
