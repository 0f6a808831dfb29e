"""Micro-batches of one rank, step by step, with a position that can be saved.

A step takes the next `micro_batch * accumulation * dp` rows of the epoch's order, whatever the split; what is
left at an epoch's end is a smaller step, with fewer micro-batches, and nothing is carried into the next
epoch. All ranks compute the same counts from the same numbers, so none of them ends before another: a rank
that is left without a row gets padding. The ranks of one sequence-parallel group take slices of the same rows.

Steps are read ahead by threads. The position is that behind the last step that was handed out, never that of what
was read ahead, and all that is handed out follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stack.config.schema_data import DataConfig
from stack.data.batch import MicroBatch
from stack.data.mixture import Mixture, Share, as_shares
from stack.data.part import Account, PackedPart
from stack.data.prefetch import Prefetcher
from stack.data.slices import Slicer
from stack.data.store import TokenStore
from stack.errors import DataError


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, over all ranks."""

    epoch: int
    places: range
    """In the epoch's order."""

    behind: tuple[int, int]
    """Epoch and place of the next step."""


class Dealer:
    """Deals an order's rows to ranks micro-batch by micro-batch, and reads this rank's share: as many on every rank."""

    def __init__(
        self,
        mixture: Mixture,
        data: DataConfig,
        *,
        dp: int,
        dp_rank: int,
        sp: int,
        sp_rank: int,
        pin: torch.device | None,
    ):
        self._mixture, self._micro_batch, self._dp, self._dp_rank = mixture, data.micro_batch, dp, dp_rank
        self._slicer, self._pin = Slicer(data.seq_len, sp, sp_rank), pin

    def calls(self, epoch: int, places: range) -> list[Callable[[], MicroBatch]]:
        """A call for each micro-batch of this rank."""
        size, first = self._micro_batch, self._dp_rank * self._micro_batch
        groups = (places[begin:] for begin in range(0, len(places), size * self._dp))
        return [partial(self._read, epoch, group[first : first + size]) for group in groups]

    def _read(self, epoch: int, places: range) -> MicroBatch:
        rows = [self._mixture.row(epoch, place) for place in places]
        batch = self._slicer.micro_batch(rows, self._micro_batch, self._mixture.parts[0].pad_id)
        return batch if self._pin is None else batch.pinned(self._pin)


class Loader:
    """Training rows of a store, or of a mixture of stores."""

    def __init__(
        self,
        stores: TokenStore | Sequence[Share],
        data: DataConfig,
        *,
        dp: int,
        dp_rank: int,
        accumulation: int,
        seed: int,
        epochs: int | None = None,
        sp: int = 1,
        sp_rank: int = 0,
        pin: torch.device | None = None,
    ):
        """epochs: passes over the rows, None for no end. pin: the CUDA device that page-locked batches are for; None: they are
        not page-locked. Raises DataError if the text does not fill one row, or nothing in it can be learned."""
        shares = as_shares(stores)
        self.mixture = Mixture(shares, data, seed)
        for each in self.mixture.parts:
            _require_one_row(each, data)
        self._epochs = epochs
        self.rows_per_step = data.micro_batch * accumulation * dp
        self.tokenizer_hash = _tokenizer_hash(shares)
        """Of the tokenizer that made the ids; None if it is not known or there is none."""

        self._dealer = Dealer(self.mixture, data, dp=dp, dp_rank=dp_rank, sp=sp, sp_rank=sp_rank, pin=pin)
        self._prefetcher: Prefetcher[StepPlan, MicroBatch] = Prefetcher(data.workers, data.prefetch)
        self._behind = (0, 0)
        """Epoch, and rows of it that were handed out."""

        self._last: StepPlan | None = None
        self._reading = False
        """Whether the prefetcher goes on from `_behind`."""

        self._identity = _identity(shares, data, seed)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return self.mixture.num_rows

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, with the smaller one at its end."""
        return math.ceil(self.num_rows / self.rows_per_step)

    @property
    def account(self) -> Account:
        """Where the tokens of the store went; of a mixture, those of its first."""
        return self.mixture.parts[0].account

    def describe(self) -> list[str]:
        """What is read, for people."""
        if len(self.mixture.parts) == 1:
            return [f"training: {self.account}"]
        return ["training on a mixture:", *(f"  {line}" for line in self.mixture.describe())]

    def next_step(self) -> list[MicroBatch] | None:
        """This rank's micro-batches of the next step, as many as on every other rank; None after the last epoch. Raises what
        reading them raised; the position stays where it was then."""
        if not self._reading:
            self._prefetcher.start(self._steps(*self._behind))
        self._reading = False
        found = self._prefetcher.next()
        self._reading = True
        if found is None:
            return None
        self._last, batches = found
        self._behind = self._last.behind
        return batches

    def drawn_tokens(self) -> dict[str, int]:
        """Tokens of each part of a mixture in all steps so far, by name and from the mean of its rows; {} without a
        mixture."""
        return self.mixture.drawn(*self._behind) if len(self.mixture.parts) > 1 else {}

    def describe_last_step(self) -> list[str]:
        """The documents that the last step read on all ranks, a line each, for people."""
        if self._last is None:
            return []
        rows = (self.mixture.row(self._last.epoch, place) for place in self._last.places)
        return [line for each, row in rows for line in each.describe_row(row)]

    def state(self) -> dict[str, Any]:
        """The position behind the last step, small, JSON, and the same on every rank and for any number of
        ranks."""
        epoch, row = self._behind
        return {
            "epoch": epoch,
            "row": row,
            "identity": dict(self._identity),
            "tokenizer": self.tokenizer_hash,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, at any number of ranks. Raises DataError if it belongs to other
        rows."""
        saved, now = state["identity"], self._identity
        changed = [
            f"{key} was {saved.get(key)!r} and is {now.get(key)!r}"
            for key in {**now, **saved}
            if saved.get(key) != now.get(key)
        ]
        if changed:
            raise DataError(
                f"the saved position belongs to other rows: {'; '.join(changed)}. Fix: restore these settings and the same "
                "text; or read the new rows from their first on: checkpoint.force=[data.path]; or start a new run from the "
                "saved weights: name=NEW_NAME checkpoint.weights_from=CHECKPOINT"
            )
        self._behind, self._reading = (state["epoch"], state["row"]), False

    def close(self) -> None:
        """End the threads that read ahead."""
        self._reading = False
        self._prefetcher.close()

    def _steps(self, epoch: int, row: int) -> Iterator[tuple[StepPlan, list[Callable[[], MicroBatch]]]]:
        while self._epochs is None or epoch < self._epochs:
            end = min(row + self.rows_per_step, self.num_rows)
            behind = (epoch + 1, 0) if end == self.num_rows else (epoch, end)
            step = StepPlan(epoch, range(row, end), behind)
            yield step, self._dealer.calls(epoch, step.places)
            epoch, row = behind


class EvalLoader:
    """Rows of the held-out documents, in the store's order; can be walked through again and again."""

    def __init__(
        self,
        stores: TokenStore | Sequence[Share],
        data: DataConfig,
        *,
        dp: int,
        dp_rank: int,
        max_rows: int,
        sp: int = 1,
        sp_rank: int = 0,
        pin: torch.device | None = None,
    ):
        """max_rows: rows used, at most, over all ranks."""
        self._mixture = Mixture(as_shares(stores), data, 0, held_out=True)
        self._dealer = Dealer(self._mixture, data, dp=dp, dp_rank=dp_rank, sp=sp, sp_rank=sp_rank, pin=pin)
        self._rows_per_batch = data.micro_batch * dp
        self.num_rows = min(self._mixture.num_rows, max_rows)

    def __len__(self) -> int:
        """Micro-batches of this rank and of every other."""
        return math.ceil(self.num_rows / self._rows_per_batch)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (call() for call in self._dealer.calls(0, range(self.num_rows)))

    def describe(self) -> str:
        """What is held out, for people; says so if it is nothing."""
        accounts = [part.account for part in self._mixture.parts]
        if self._mixture.num_rows == 0:
            dropped = "; ".join(reason for account in accounts for reason in account.dropped)
            return (
                f"held out for evaluation: no document{f' (dropped: {dropped})' if dropped else ''}. Raise "
                "data.eval_fraction, or give more documents, to have some"
            )
        used = " | ".join(str(account) for account in accounts if account.rows)
        return f"held out for evaluation: {used}; {self.num_rows:,} rows are used"


def _identity(shares: Sequence[Share], data: DataConfig, seed: int) -> dict[str, Any]:
    """All that decides which row stands where."""
    identity: dict[str, Any] = {
        "content": shares[0].store.info.content,
        "seq_len": data.seq_len,
        "packing": data.packing,
        "eval_fraction": data.eval_fraction,
        "shuffle": data.shuffle,
        "seed": seed,
    }
    # Left out where they say nothing new, so that positions saved without them hold.
    if data.too_long != "split":
        identity["too_long"] = data.too_long
    if len(shares) > 1:
        identity["content"] = [share.store.info.content for share in shares]
    if len(shares) > 1 or shares[0].epochs is not None:
        identity["shares"] = [[share.weight, share.epochs] for share in shares]
    return identity


def _tokenizer_hash(shares: Sequence[Share]) -> str | None:
    hashes = {share.store.info.tokenizer_hash for share in shares} - {None}  # ids of other tools have none
    if len(hashes) > 1:
        found = ", ".join(f"{share.name}: {share.store.info.tokenizer_hash}" for share in shares)
        raise DataError(
            f"the parts of data.mixture were made by different tokenizers ({found}). Fix: give one with model.tokenizer"
        )
    return hashes.pop() if hashes else None


def _require_one_row(part: PackedPart, data: DataConfig) -> None:
    targets, folder = part.documents.num_targets, part.store.folder
    if targets and (data.packing != "concat" or part.num_tokens >= data.seq_len):
        return
    account = part.account
    if account.dropped and not targets:
        raise DataError(
            f"{folder}: nothing is left to learn from; dropped: {'; '.join(account.dropped)}. Fix: raise data.seq_len or set "
            "data.too_long=split where documents are too long; mark other targets where there are none"
        )
    raise DataError(
        f"{folder}: {account.tokens:,} tokens in {account.documents:,} training documents do not fill one row of "
        f"data.seq_len={data.seq_len}. Fix: give more text, or lower data.seq_len"
    )
