"""The slow twin of packing and slices: rows as lists, token by token, whole; cut for ranks by `parallel.shard_batch`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stack.data.batch import IGNORE, MicroBatch
from stack.data.best_fit import best_fit
from stack.data.store import TokenStore


@dataclass(frozen=True)
class Place:
    """One token of a row: its place in the store, in its piece, and in its document counted from the end."""

    token: int
    position: int
    left: int


Row = list[Place]


def whole_rows(store: TokenStore, documents: list[int], packing: str, seq_len: int) -> list[Row]:
    """All rows over these documents, in the store's order but for `best_fit`, which packs them as one block."""
    pieces = []  # documents cut every seq_len tokens, or not at all
    for document in documents:
        begin, end = int(store.offsets[document]), int(store.offsets[document + 1])
        step = end - begin if packing == "concat" else seq_len
        pieces.append(
            [[(t, end - 1 - t) for t in range(a, min(a + step, end))] for a in range(begin, end, step)]
        )
    if packing == "concat":
        stream = [place for document in pieces for piece in document for place in piece]
        groups = [[stream[a : a + seq_len]] for a in range(0, len(stream), seq_len)]
    elif packing == "document":
        groups = [[piece] for document in pieces for piece in document]
    else:
        full = [piece for document in pieces for piece in document if len(piece) == seq_len]
        short = [document[-1] for document in pieces if len(document[-1]) < seq_len]
        order, ends = best_fit(np.array([len(piece) for piece in short], np.int64), seq_len)
        starts = [0, *ends.tolist()]
        groups = [[piece] for piece in full]
        groups += [[short[i] for i in order[a:b]] for a, b in zip(starts[:-1], starts[1:], strict=True)]
    rows = []
    for group in groups:
        row: Row = []
        for token, left in (place for piece in group for place in piece):
            follows = row and row[-1].token + 1 == token and row[-1].left == left + 1
            row.append(Place(token, row[-1].position + 1 if follows else 0, left))
        rows.append(row)
    return rows


def whole_batch(store: TokenStore, rows: list[Row], num_rows: int, seq_len: int) -> MicroBatch:
    """The given rows, and rows of padding up to `num_rows`."""
    pad, size = store.info.eos_id or 0, store.num_tokens
    ids, labels, positions, bounds = [], [], [], [0]
    for index in range(num_rows):
        row = rows[index] if index < len(rows) else []
        for place in row:
            ids.append(int(store.read(place.token, place.token + 1)[0]))
            allowed = store.read_targets(min(place.token + 1, size), min(place.token + 2, size))
            wanted = place.left > 0 and (allowed is None or bool(allowed[0]))
            labels.append(int(store.read(place.token + 1, place.token + 2)[0]) if wanted else IGNORE)
            positions.append(place.position)
        bounds += [index * seq_len + at for at, place in enumerate(row) if at and place.position == 0]
        rest = seq_len - len(row)
        bounds += [index * seq_len + len(row)] * (0 < rest < seq_len) + [(index + 1) * seq_len]
        ids, labels, positions = ids + [pad] * rest, labels + [IGNORE] * rest, positions + list(range(rest))
    shape = (num_rows, seq_len)
    return MicroBatch(
        torch.tensor(ids).view(shape),
        torch.tensor(labels).view(shape),
        torch.tensor(positions).view(shape),
        torch.tensor(bounds, dtype=torch.int32),
        tuple(len(rows[index]) if index < len(rows) else 0 for index in range(num_rows)),
    )
