"""Several parts read together, each by its share of the tokens, in an order that any place of it can be computed from.

An epoch of the mixture holds a fixed number of rows of each part, evenly spread: the n-th of a part's N rows stands at
(n + 1/2) / N of the epoch, so that every stretch of the order has the parts in their shares. A part goes on in its own order
from one epoch of the mixture to the next, and starts again when it is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from stack.config.schema_data import DataConfig
from stack.data.order import RowOrder
from stack.data.part import PackedPart
from stack.data.store import TokenStore

FAR = 0.05
"""How far a part's tokens may lie from what its weight asks, as a share of that, before it is told."""


@dataclass(frozen=True)
class Share:
    """A store in a mixture. Either `weight` or `epochs` is given, the same one for all; a store alone needs neither."""

    store: TokenStore
    name: str = ""
    weight: float | None = None
    """Of its tokens among those of all parts, in any unit."""

    epochs: float | None = None
    """Passes over it in one epoch of the mixture."""


def as_shares(stores: TokenStore | Sequence[Share]) -> list[Share]:
    """A single store is a mixture of one."""
    return list(stores) if isinstance(stores, Sequence) else [Share(stores)]


def shares_of(data: DataConfig, stores: Sequence[TokenStore]) -> list[Share]:
    """The stores of the settings, one for each part of `data.mixture` or one in all, with what is read of them."""
    if not data.mixture:
        return [Share(store, data.name) for store in stores]
    return [
        Share(store, part.name, part.weight, part.epochs)
        for store, part in zip(stores, data.mixture, strict=True)
    ]


class Mixture:
    """The rows of several parts in one order. A part alone comes in its own order, epoch by epoch."""

    def __init__(self, shares: Sequence[Share], data: DataConfig, seed: int, *, held_out: bool = False):
        """held_out: the rows for evaluation, none of them twice; parts without any are left out then."""
        self.shares = list(shares)
        self.parts = [PackedPart(share.store, data, held_out=held_out) for share in shares]
        self.rows = _rows_of_epoch(self.shares, self.parts)
        if held_out:
            self.rows = [min(rows, part.num_rows) for rows, part in zip(self.rows, self.parts, strict=True)]
        self.num_rows = sum(self.rows)
        """Of one epoch of the mixture."""

        shuffle = data.shuffle and not held_out

        def order(part: int, turn: int) -> RowOrder:
            return RowOrder(self.parts[part].num_rows, seed, turn, shuffle)

        self._order = lru_cache(2 * len(self.parts))(order)

    def row(self, epoch: int, place: int) -> tuple[PackedPart, int]:
        """The part and the row of it that stand at a place of an epoch."""
        index, nth = self._deal(place) if len(self.parts) > 1 else (0, place)
        part = self.parts[index]
        turn, place = divmod(epoch * self.rows[index] + nth, part.num_rows)
        return part, self._order(index, turn)[place]

    def drawn(self, epoch: int, place: int) -> dict[str, int]:
        """Tokens of each part, by name, in all rows before a place of an epoch, from the mean of the part's rows."""
        return {
            share.name: (epoch * rows + nth) * part.num_tokens // max(part.num_rows, 1)
            for share, part, rows, nth in zip(
                self.shares, self.parts, self.rows, self._count_before(place), strict=True
            )
        }

    def describe(self) -> list[str]:
        """For people: a line for each part, with its account and what an epoch takes of it."""
        lines, tokens = [], list(self.drawn(1, 0).values())
        for share, part, rows, drawn in zip(self.shares, self.parts, self.rows, tokens, strict=True):
            lines.append(
                f"{share.name}: {rows:,} rows ({rows / max(part.num_rows, 1):.3g} passes), {drawn:,} tokens, "
                f"{drawn / max(sum(tokens), 1):.1%} of an epoch; of {part.account}"
            )
        return lines + self._far_from_weights(tokens)

    def _far_from_weights(self, tokens: list[int]) -> list[str]:
        """A warning where parts of few rows give other shares than their weights; tokens: of each part in an epoch."""
        weights, total = [share.weight or 0.0 for share in self.shares], sum(tokens)
        asked = [
            weight / sum(weights) * total if any(weights) else drawn
            for weight, drawn in zip(weights, tokens, strict=True)
        ]
        told = [
            f"{share.name} {drawn / total:.1%} (asked {want / total:.1%})"
            for share, drawn, want in zip(self.shares, tokens, asked, strict=True)
            if abs(drawn - want) > FAR * want
        ]
        if not told:
            return []
        return [
            f"warning: the mixture's shares are not those of the weights: {', '.join(told)}. A whole number of rows is drawn, and "
            "the part that is through first has few. Fix: epochs in place of weight, several for each part; more data for "
            "the small part; or a smaller data.seq_len"
        ]

    def _deal(self, place: int) -> tuple[int, int]:
        counts = self._count_before(place)
        index = self._next(counts)
        return index, counts[index]

    def _next(self, counts: list[int]) -> int:
        """The part whose next row stands first."""
        left = [index for index, rows in enumerate(self.rows) if counts[index] < rows]
        return min(left, key=lambda index: (Fraction(2 * counts[index] + 1, self.rows[index]), index))

    def _count_before(self, place: int) -> list[int]:
        """Rows of each part before a place: as many as stand before a point that is surely not beyond it, and then one by
        one."""
        total, point = self.num_rows, max(0, place - len(self.rows))
        # (2 n + 1) / (2 rows) < point / total for the first n of a part
        counts = [max(0, -((total - 2 * rows * point) // (2 * total))) for rows in self.rows]
        while sum(counts) < place:
            counts[self._next(counts)] += 1
        return counts


def _rows_of_epoch(shares: list[Share], parts: list[PackedPart]) -> list[int]:
    """Rows of each part in one epoch of the mixture: by its passes, or by weight, so many that the part which is through
    first is read once."""
    if all(share.weight is None for share in shares):
        return [
            max(
                round(part.num_rows * Fraction(1 if share.epochs is None else share.epochs)),
                min(part.num_rows, 1),
            )
            for share, part in zip(shares, parts, strict=True)
        ]
    weights = [Fraction(share.weight or 0) for share in shares]
    held = [(weight, part) for weight, part in zip(weights, parts, strict=True) if part.num_rows]
    per_weight = min((part.num_tokens / weight for weight, part in held), default=Fraction(0))
    return [
        max(int(weight * per_weight * part.num_rows / part.num_tokens), 1) if part.num_rows else 0
        for weight, part in zip(weights, parts, strict=True)
    ]
