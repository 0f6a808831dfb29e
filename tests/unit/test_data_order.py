"""The order of rows in an epoch."""

from __future__ import annotations

import pytest

from stack.data.order import RowOrder


@pytest.mark.parametrize("num_rows", [*range(1, 40), 100, 257, 1000])
def test_every_row_once(num_rows: int) -> None:
    order = RowOrder(num_rows, seed=3, epoch=0, shuffle=True)
    assert sorted(order[place] for place in range(num_rows)) == list(range(num_rows))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        order = RowOrder(50, seed, epoch, shuffle=True)
        return [order[place] for place in range(50)]

    assert rows(1, 0) == rows(1, 0)
    assert len({tuple(rows(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_order_is_fixed_for_ever() -> None:
    """A run that resumes after an upgrade must see the order it started with."""
    order = RowOrder(10, seed=1234, epoch=0, shuffle=True)
    assert [order[place] for place in range(10)] == FIRST_TEN


def test_places_are_spread() -> None:
    """Mean distance between a row and its place: a third of the rows for a random permutation."""
    order = RowOrder(3000, seed=5, epoch=1, shuffle=True)
    mean = sum(abs(order[place] - place) for place in range(3000)) / 3000
    assert 900 < mean < 1100


def test_off_and_out_of_range() -> None:
    order = RowOrder(4, seed=1, epoch=7, shuffle=False)
    assert [order[place] for place in range(4)] == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        order[4]


FIRST_TEN = [1, 9, 7, 4, 5, 6, 3, 2, 8, 0]
