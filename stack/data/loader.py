"""Micro-batches of one data-parallel rank, step by step, with a position that can be saved.

A step takes the next `micro_batch * accumulation * dp` rows of the epoch's order, whatever the split; what is
left at an epoch's end is a smaller step, with fewer micro-batches, and nothing is carried into the next
epoch. All ranks compute the same counts from the same numbers, so none of them ends before another: a rank
that is left without a row gets padding. The ranks of one sequence-parallel group take the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stack.config.schema_data import DataConfig
from stack.data.batch import MicroBatch
from stack.data.order import RowOrder
from stack.data.packing import Account, PackedPart
from stack.data.store import TokenStore
from stack.errors import DataError


class Loader:
    """Training rows of a store."""

    def __init__(
        self,
        store: TokenStore,
        data: DataConfig,
        *,
        dp: int,
        dp_rank: int,
        accumulation: int,
        seed: int,
        epochs: int | None = None,
    ):
        """epochs: passes over the rows, None for no end. Raises DataError if the text does not fill one
        row."""
        documents, _ = store.split(data.eval_fraction)
        self._part = PackedPart(store, documents, data.packing, data.seq_len)
        self._require_one_row(store, data)
        self._data, self._dp, self._dp_rank, self._seed, self._epochs = data, dp, dp_rank, seed, epochs
        self.rows_per_step = data.micro_batch * accumulation * dp
        self._epoch = 0
        self._row = 0
        """Rows of this epoch that are done."""

        self.tokenizer_hash = store.info.tokenizer_hash
        """Of the tokenizer that made the ids; None if it is not known or there is none."""

        self._last_rows: list[int] = []
        self._order = self._make_order()
        self._identity = {
            "content": store.info.content,
            "seq_len": data.seq_len,
            "packing": data.packing,
            "eval_fraction": data.eval_fraction,
            "shuffle": data.shuffle,
            "seed": seed,
        }

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return self._part.num_rows

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, with the smaller one at its end."""
        return math.ceil(self.num_rows / self.rows_per_step)

    @property
    def account(self) -> Account:
        """Where the tokens of one epoch went."""
        return self._part.account

    def next_step(self) -> list[MicroBatch] | None:
        """This rank's micro-batches of the next step, as many as on every other rank; None after the last
        epoch."""
        if self._epochs is not None and self._epoch >= self._epochs:
            return None
        places = range(self._row, min(self._row + self.rows_per_step, self.num_rows))
        rows = [self._order[place] for place in places]
        self._row, self._last_rows = self._row + len(rows), rows
        if self._row == self.num_rows:
            self._epoch, self._row = self._epoch + 1, 0
            self._order = self._make_order()
        return list(deal_rows(self._part, rows, self._data.micro_batch, self._dp, self._dp_rank))

    def describe_last_step(self) -> list[str]:
        """The documents that the last step read on all ranks, a line each, for people."""
        return [line for row in self._last_rows for line in self._part.describe_row(row)]

    def state(self) -> dict[str, Any]:
        """The position behind the last step, small, JSON, and the same on every rank and for any number of
        ranks."""
        return {
            "epoch": self._epoch,
            "row": self._row,
            "identity": dict(self._identity),
            "tokenizer": self.tokenizer_hash,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, at any number of ranks. Raises DataError if it belongs to other
        rows."""
        saved = state["identity"]
        changed = [
            f"{key} was {saved.get(key)!r} and is {now!r}"
            for key, now in self._identity.items()
            if saved.get(key) != now
        ]
        if changed:
            raise DataError(
                f"the saved position belongs to other rows: {'; '.join(changed)}. Fix: restore these settings and the same "
                "text; or read the new rows from their first on: checkpoint.force=[data.path]; or start a new run from the "
                "saved weights: name=NEW_NAME checkpoint.weights_from=CHECKPOINT"
            )
        self._epoch, self._row = state["epoch"], state["row"]
        self._order = self._make_order()

    def _make_order(self) -> RowOrder:
        return RowOrder(self.num_rows, self._seed, self._epoch, self._data.shuffle)

    def _require_one_row(self, store: TokenStore, data: DataConfig) -> None:
        account = self._part.account
        if account.targets == 0 or (data.packing == "concat" and account.tokens < data.seq_len):
            raise DataError(
                f"{store.folder}: {account.tokens:,} tokens in {account.documents:,} training documents do not fill one row "
                f"of data.seq_len={data.seq_len}. Fix: give more text, or lower data.seq_len"
            )


class EvalLoader:
    """Rows of the held-out documents, in the store's order; can be walked through again and again."""

    def __init__(self, store: TokenStore, data: DataConfig, *, dp: int, dp_rank: int, max_rows: int):
        """max_rows: rows used, at most, over all ranks."""
        _, documents = store.split(data.eval_fraction)
        self._part = PackedPart(store, documents, data.packing, data.seq_len)
        self._micro_batch, self._dp, self._dp_rank = data.micro_batch, dp, dp_rank
        self.num_rows = min(self._part.num_rows, max_rows)

    def __len__(self) -> int:
        """Micro-batches of this rank and of every other."""
        return math.ceil(self.num_rows / (self._micro_batch * self._dp))

    def __iter__(self) -> Iterator[MicroBatch]:
        return deal_rows(self._part, list(range(self.num_rows)), self._micro_batch, self._dp, self._dp_rank)

    def describe(self) -> str:
        """What is held out, for people; says so if it is nothing."""
        if self._part.num_rows == 0:
            return "held out for evaluation: no document. Raise data.eval_fraction, or give more documents, to have some"
        return f"held out for evaluation: {self._part.account}; {self.num_rows:,} rows are used"


def deal_rows(
    part: PackedPart, rows: list[int], micro_batch: int, dp: int, dp_rank: int
) -> Iterator[MicroBatch]:
    """Deal rows to ranks micro-batch by micro-batch, and give this rank's share: the same number on every
    rank."""
    for begin in range(0, len(rows), micro_batch * dp):
        first = begin + dp_rank * micro_batch
        yield part.micro_batch(rows[first : first + micro_batch], micro_batch)
