"""Rows filled with whole documents: best-fit decreasing (Johnson 1973), as Ding et al. 2024 use it for language models
("Fewer Truncations Improve Language Modeling").

The longest document goes first, each into the fullest row that still has room for it. Documents of one length are dealt out
together, which gives what one after the other would: a row that took one of them is the fullest with room for the next
(Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", pack by such counts). So the work grows with
the number of different lengths more than with that of documents.

Documents are packed within blocks, so that a row can be found again from its block alone and memory is bounded. A block
holds 256 rows or more, of which the last is not full: 0.2 % of padding on average.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stack.data.documents import BLOCK, Documents
from stack.data.packing import Pieces, count_longer, cut_documents, join, rows_by_block
from stack.data.store import TokenStore

ROWS_PER_BLOCK = 256
LARGEST_BLOCK = 1 << 20
PLACED_DOCUMENTS = 1 << 24
"""Documents whose place in rows is remembered: 2 bytes each, 4 in large blocks. Beyond that it is worked out again."""


def best_fit(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items of these lengths, each from 1 to `seq_len`, into rows.

    Returns the items row by row, int64 [items], and where each row ends among them, int64 [rows].
    """
    # A small type for what is sorted: numpy then counts in place of comparing.
    order = np.argsort((seq_len - lengths).astype(np.min_scalar_type(seq_len)), kind="stable")
    ordered = lengths[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=0))  # of each length
    sizes, counts = ordered[firsts], np.diff(firsts, append=len(order))
    rows: list[int] = []  # of each item, in `order`
    num_rows = 0
    room_of: dict[int, list[int]] = {}  # tokens of room -> rows that have as much
    rooms: list[int] = []  # its keys, sorted
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        while count:
            place = bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms.pop(place)
                free = room_of.pop(room)
            else:
                room, each = seq_len, seq_len // size
                free = list(range(num_rows, num_rows + -(-count // each)))
                num_rows += len(free)
            each = room // size
            taken, free = free[: count // each], free[count // each :]
            rows += taken if each == 1 else [row for row in taken for _ in range(each)]
            count -= len(taken) * each
            _give_back(room_of, rooms, room - each * size, taken)
            if free and 0 < count < each:
                rows += free[:1] * count
                _give_back(room_of, rooms, room - count * size, free[:1])
                free, count = free[1:], 0
            _give_back(room_of, rooms, room, free)
    row_of = np.array(rows, np.int64)
    by_row = np.argsort(row_of.astype(np.min_scalar_type(num_rows)), kind="stable")
    return order[by_row], np.cumsum(np.bincount(row_of, minlength=num_rows))


def _give_back(room_of: dict[int, list[int]], rooms: list[int], room: int, rows: list[int]) -> None:
    if not room or not rows:
        return
    if room in room_of:
        room_of[room] += rows
    else:
        room_of[room] = rows
        insort(rooms, room)


@dataclass(frozen=True)
class _Block:
    """How the documents of a block stand in its rows: first the rows that a document fills alone, then the others."""

    num_full: int
    packed: np.ndarray
    """Documents of the other rows, row by row, by their number in the block."""

    ends: np.ndarray
    """Where each of these rows ends in `packed` [rows]."""


class BestFitRows:
    """Rows of whole documents. A document of more than `seq_len` tokens fills rows of its own, and what is left of it is
    packed as a document is."""

    def __init__(self, documents: Documents, seq_len: int):
        self.documents, self.seq_len = documents, seq_len
        self._pack = lru_cache(max(2, PLACED_DOCUMENTS // documents.block_size))(self._pack_block)
        totals = []
        for index in range(documents.num_blocks):
            block = self._pack(index)
            totals.append(block.num_full + len(block.ends))
            documents.let_go(index)
        self.block_rows = np.cumsum([0, *totals])
        """Rows ahead of each block, and of all."""

        self.num_rows = int(self.block_rows[-1])

    def _pack_block(self, index: int) -> _Block:
        _, lengths = self.documents.block(index)
        full, left = np.divmod(lengths, self.seq_len)
        items = np.flatnonzero(left)
        order, ends = best_fit(left[items], self.seq_len)
        small = np.min_scalar_type(len(lengths))
        return _Block(int(full.sum()), items[order].astype(small), ends.astype(small))

    def pieces(self, first: int, last: int) -> Pieces:
        return join(
            part
            for index, rows in rows_by_block(self.block_rows, first, last)
            for part in self._in_block(index, rows)
        )

    def _in_block(self, index: int, rows: np.ndarray) -> list[Pieces]:
        """Rows of one block, those that a document fills alone apart from the others."""
        block, (begins, lengths) = self._pack(index), self.documents.block(index)
        nth = rows - self.block_rows[index]
        num_full = int(np.searchsorted(nth, block.num_full))
        parts = []
        if num_full:
            found = cut_documents(nth[:num_full], begins, lengths, lengths // self.seq_len, self.seq_len)
            parts.append(found._replace(rows=rows[:num_full]))
        if num_full < len(rows):
            nth = nth[num_full:] - block.num_full
            low = int(block.ends[nth[0] - 1]) if nth[0] else 0
            ends = block.ends[nth].astype(np.int64)
            packed = block.packed[low : int(ends[-1])]
            left = lengths[packed] % self.seq_len
            at = begins[packed] + lengths[packed] - left
            of_rows = np.repeat(rows[num_full:], np.diff(ends, prepend=low))
            parts.append(Pieces(of_rows, at, left, np.zeros(len(packed), bool)))
        return parts

    def num_cut(self) -> int:
        return count_longer(self.documents, self.seq_len)


def block_size(store: TokenStore, seq_len: int) -> int:
    """Documents that are packed together: enough to fill `ROWS_PER_BLOCK` rows on average, within bounds."""
    size = BLOCK
    while size < LARGEST_BLOCK and size * store.num_tokens < ROWS_PER_BLOCK * seq_len * store.num_documents:
        size *= 2
    return size
