"""Rows -> the tensors of one rank's slice of them, read straight from the token store.

The boundaries of the whole rows follow from the documents' offsets alone, so each rank of a sequence-parallel group works
them out for itself; of tokens it reads its own slice and the one behind it, which is the last position's target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stack.data.batch import IGNORE, MicroBatch
from stack.data.packing import Pieces
from stack.data.part import PackedPart


class Slicer:
    """Makes micro-batches of rank `sp_rank` of `sp`.

    A length that `sp` does not divide is padded at each row's end with positions that have no target and are a document of
    their own, as `parallel.shard_batch` does with whole rows.
    """

    def __init__(self, seq_len: int, sp: int = 1, sp_rank: int = 0):
        self.seq_len = seq_len
        self.seq_local = -(-seq_len // sp)
        self.seq_padded = self.seq_local * sp
        self.low = sp_rank * self.seq_local
        """Where the slice begins in its row."""

    def micro_batch(self, rows: Sequence[tuple[PackedPart, int]], num_rows: int, pad_id: int) -> MicroBatch:
        """The given rows, and rows of padding up to `num_rows`."""
        shape = (num_rows, self.seq_local)
        ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORE, np.int64)
        positions = np.zeros(shape, np.int64)
        ids[:, max(0, self.seq_len - self.low) :] = 0  # behind the row's end
        bounds, row_tokens = [np.zeros(1, np.int64)], []
        for index in range(num_rows):
            ends = np.zeros(0, np.int64)
            if index < len(rows):
                part, row = rows[index]
                pieces = part.pieces(row)
                ends = np.cumsum(pieces.lengths)
                self._fill(part, pieces, ends, (ids[index], labels[index], positions[index]))
            num_tokens = int(ends[-1]) if len(ends) else 0
            places = np.arange(max(self.low, num_tokens), min(self.low + self.seq_local, self.seq_len))
            positions[index, places - self.low] = places - num_tokens
            tail = [end for end in (self.seq_len, self.seq_padded) if end > num_tokens]
            bounds.append(
                index * self.seq_padded + np.concatenate([ends, np.unique(np.array(tail, np.int64))])
            )
            row_tokens.append(num_tokens)
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(np.concatenate(bounds).astype(np.int32)),
            row_tokens=tuple(row_tokens),
        )

    def _fill(
        self,
        part: PackedPart,
        pieces: Pieces,
        ends: np.ndarray,
        into: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Tokens, targets and positions of one row's slice. ends: of the pieces in the row. into: ids, labels and positions,
        each [seq_local]."""
        low, high = self.low, self.low + self.seq_local
        starts = ends - pieces.lengths
        mine = slice(
            int(np.searchsorted(ends, low, side="right")), int(np.searchsorted(starts, high, side="left"))
        )
        starts, ends = starts[mine], ends[mine]
        if not len(starts):
            return
        ids, labels, positions = into
        first, behind = np.maximum(starts, low), np.minimum(ends, high)
        begins, lengths = pieces.begins[mine] + first - starts, behind - first
        follows = pieces.goes_on[mine] | (behind < ends)
        positions[: behind[-1] - low] = np.arange(low, behind[-1]) - np.repeat(starts, lengths)
        # Documents that are neighbours in the store as well are read in one go.
        breaks = np.flatnonzero(begins[1:] != begins[:-1] + lengths[:-1]) + 1
        for run in np.split(np.arange(len(begins)), breaks):
            begin = int(begins[run[0]])
            end = int(begins[run[-1]] + lengths[run[-1]])
            wide = end + int(follows[run[-1]])
            at, tokens = int(first[run[0]]) - low, part.store.read(begin, wide)
            ids[at : at + end - begin] = tokens[: end - begin]
            targets = labels[at : at + wide - begin - 1]
            targets[:] = tokens[1:]
            allowed = part.store.read_targets(begin, wide)
            if allowed is not None:
                targets[~allowed[1:]] = IGNORE
        labels[(behind - low - 1)[~follows]] = IGNORE
