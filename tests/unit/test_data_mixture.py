"""Mixtures: parts in their shares of tokens at every place of the order, each row of a part as often as asked for."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stack.checkpoint.state import TrainState
from stack.config.mixture_checks import mixture_faults
from stack.config.schema_data import DataConfig, MixturePart
from stack.data.loader import EvalLoader, Loader
from stack.data.mixture import Mixture, Share
from stack.data.store import TokenStore
from stack.errors import DataError
from stack.train.feeding import LoaderHook
from tests.stores import counting_store

SEQ = 10
DATA = DataConfig(seq_len=SEQ, eval_fraction=0.0)


@pytest.fixture
def stores(tmp_path: Path) -> list[TokenStore]:
    """Full rows: 30, 7 and 100 of them."""
    return [counting_store(tmp_path / str(rows), [SEQ * rows]) for rows in (30, 7, 100)]


def mixture_of(stores: list[TokenStore], data: DataConfig = DATA, **shares: list[float]) -> Mixture:
    names = "abcdef"
    made = [
        Share(store, names[index], **{kind: values[index] for kind, values in shares.items()})
        for index, store in enumerate(stores)
    ]
    return Mixture(made, data, 1)


def order(mixture: Mixture, epoch: int = 0) -> list[tuple[int, int]]:
    rows = (mixture.row(epoch, place) for place in range(mixture.num_rows))
    return [(mixture.parts.index(part), row) for part, row in rows]


def test_each_row_comes_as_often_as_its_part_is_read(stores: list[TokenStore]) -> None:
    mixture = mixture_of(stores, epochs=[1, 3, 0.5])
    assert mixture.rows == [30, 21, 50]
    seen = Counter(order(mixture))
    assert [seen[0, row] for row in range(30)] == [1] * 30
    assert [seen[1, row] for row in range(7)] == [3] * 7
    assert len([1 for part, _ in seen if part == 2]) == 50 and sum(seen.values()) == 101
    both = seen + Counter(order(mixture, 1))
    assert [both[2, row] for row in range(100)] == [1] * 100, "the second epoch reads the other half"


def test_weights_are_shares_of_tokens_and_the_scarcest_part_is_read_once(stores: list[TokenStore]) -> None:
    assert mixture_of(stores, weight=[0.5, 0.25, 0.25]).rows == [14, 7, 7]
    assert mixture_of(stores, weight=[60, 2, 200]).rows == [30, 1, 100]


def test_shares_that_are_not_the_weights_are_told(tmp_path: Path) -> None:
    few = [counting_store(tmp_path / str(rows), [SEQ * rows]) for rows in (4, 500)]
    mixture = mixture_of(few, weight=[3, 1])
    assert mixture.rows == [4, 1]
    assert mixture.describe()[2].startswith("warning:")
    assert "b 20.0% (asked 25.0%)" in mixture.describe()[2] and "epochs in place" in mixture.describe()[2]
    for sound in (mixture_of(few, weight=[1, 2]), mixture_of(few, epochs=[3, 0.01]), mixture_of(few[1:])):
        assert "warning" not in "".join(sound.describe())


def test_shares_count_tokens_and_not_rows(tmp_path: Path) -> None:
    """Rows of the second part are half full: it takes twice as many of them for the same share."""
    full, half = (
        counting_store(tmp_path / "full", [SEQ] * 90),
        counting_store(tmp_path / "half", [SEQ // 2] * 60),
    )
    mixture = mixture_of([full, half], replace(DATA, packing="document"), weight=[1, 1])
    assert mixture.rows == [30, 60] and mixture.drawn(1, 0) == {"a": 300, "b": 300}


def test_the_parts_are_evenly_spread(stores: list[TokenStore]) -> None:
    mixture = mixture_of(stores, epochs=[1, 1, 1])
    parts = [part for part, _ in order(mixture)]
    for place in range(len(parts) + 1):
        for part, rows in enumerate(mixture.rows):
            assert abs(parts[:place].count(part) - rows * place / mixture.num_rows) <= 1.5
            assert mixture.drawn(0, place)["abc"[part]] == parts[:place].count(part) * SEQ


def test_any_place_is_what_dealing_one_after_the_other_gives() -> None:
    """Against a plain sort of all rows by where they stand in the epoch."""
    for rows in ([5], [1, 1], [3, 8, 1], [1, 100], [17, 17, 4, 2], [0, 6, 2]):
        mixture: Any = SimpleNamespace(rows=rows, num_rows=sum(rows))
        mixture._next = lambda counts, mixture=mixture: Mixture._next(mixture, counts)
        mixture._count_before = lambda place, mixture=mixture: Mixture._count_before(mixture, place)
        wanted = sorted(
            ((2 * nth + 1) / (2 * count), part, nth)
            for part, count in enumerate(rows)
            for nth in range(count)
        )
        assert [Mixture._deal(mixture, place) for place in range(sum(rows))] == [each[1:] for each in wanted]


def test_a_part_alone_is_read_as_without_a_mixture(stores: list[TokenStore]) -> None:
    plain = Loader(stores[0], DATA, dp=1, dp_rank=0, accumulation=4, seed=3, epochs=2)
    mixed = Loader(
        [Share(stores[0], "a", weight=2.0)], DATA, dp=1, dp_rank=0, accumulation=4, seed=3, epochs=2
    )
    assert plain.state() == mixed.state() and plain.drawn_tokens() == {}
    while (step := plain.next_step()) is not None:
        assert [batch.input_ids.tolist() for batch in step] == [
            batch.input_ids.tolist() for batch in mixed.next_step() or []
        ]
    plain.close()
    mixed.close()


def loader_of(stores: list[TokenStore], weights: list[float], data: DataConfig = DATA) -> Loader:
    shares = [
        Share(store, name, weight=weight) for store, name, weight in zip(stores, "abc", weights, strict=True)
    ]
    return Loader(shares, data, dp=1, dp_rank=0, accumulation=4, seed=3)


def test_a_position_belongs_to_all_parts_and_their_shares(stores: list[TokenStore]) -> None:
    state = loader_of(stores, [1, 1, 2]).state()
    loader_of(stores, [1, 1, 2]).load_state(state)
    with pytest.raises(DataError, match="shares was"):
        loader_of(stores, [1, 1, 3]).load_state(state)
    with pytest.raises(DataError, match="content was"):
        loader_of([stores[1], stores[0], stores[2]], [1, 1, 2]).load_state(state)
    with pytest.raises(DataError, match="content was"):
        Loader(stores[0], DATA, dp=1, dp_rank=0, accumulation=4, seed=3).load_state(state)


def test_the_log_tells_what_is_drawn_from_each(stores: list[TokenStore]) -> None:
    before, loader = set(threading.enumerate()), loader_of(stores, [0.5, 0.25, 0.25])
    lines = loader.describe()
    assert "a: 14 rows (0.467 passes), 140 tokens, 50.0% of an epoch" in lines[1]
    assert "b: 7 rows (1 passes), 70 tokens, 25.0% of an epoch" in lines[2]
    for _ in range(7):
        loader.next_step()
    record: dict[str, Any] = {}
    hook = LoaderHook(loader)
    hook.after_step(TrainState(), record)
    assert record == {"tokens_total/a": 140, "tokens_total/b": 70, "tokens_total/c": 70}
    hook.close()
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(
    ("given", "key", "want"),
    [
        ([(1.0, None), (None, None)], "data.mixture", "a weight for all parts"),
        ([(1.0, None), (None, 1.0)], "data.mixture", "a weight for all parts"),
        ([(1.0, 1.0), (1.0, 1.0)], "data.mixture", "a weight for all parts"),
        ([(0.0, None), (1.0, None)], "data.mixture.a.weight", "above 0"),
        ([(None, 2.0), (None, -1.0)], "data.mixture.b.epochs", "above 0"),
    ],
)
def test_shares_that_do_not_go_together_are_refused(given: list[Any], key: str, want: str) -> None:
    parts = [
        MixturePart(name="ab"[i], weight=weight, epochs=epochs) for i, (weight, epochs) in enumerate(given)
    ]
    (fault,) = mixture_faults(DataConfig(mixture=parts))
    assert fault.key == key and want in fault.want and fault.fix


def test_sound_mixtures_and_what_else_is_refused() -> None:
    both = [MixturePart(name="a", weight=3), MixturePart(name="b", weight=1)]
    assert list(mixture_faults(DataConfig())) == list(mixture_faults(DataConfig(mixture=both))) == []
    same = [MixturePart(name="a"), MixturePart(name="a")]
    keys = [fault.key for fault in mixture_faults(DataConfig(mixture=same, train_tokenizer=True))]
    assert keys == ["data.mixture", "data.train_tokenizer"]


def test_held_out_rows_come_from_all_parts_and_none_twice(tmp_path: Path) -> None:
    stores = [counting_store(tmp_path / str(number), [SEQ] * 200) for number in (1, 2)]
    data = replace(DATA, eval_fraction=0.2, packing="document")
    shares = [Share(stores[0], "a", epochs=5), Share(stores[1], "b", epochs=1)]
    rows = EvalLoader(shares, data, dp=1, dp_rank=0, max_rows=8)
    assert len(list(rows)) == rows.num_rows == 8
    everything = EvalLoader(shares, data, dp=1, dp_rank=0, max_rows=10**6)
    mixture = Mixture(shares, data, 0, held_out=True)
    seen = Counter(order(mixture))
    assert set(seen.values()) == {1} and everything.num_rows == len(seen)
    assert {part for part, _ in order(mixture)[:8]} == {0, 1}


def test_parts_of_different_tokenizers_are_refused(stores: list[TokenStore]) -> None:
    stores[0].info.tokenizer_hash = "one"
    assert loader_of(stores, [1, 1, 1]).tokenizer_hash == "one", "ids of another tool have none"
    stores[2].info.tokenizer_hash = "other"
    with pytest.raises(DataError, match=r"different tokenizers .*Fix: give one with model\.tokenizer"):
        loader_of(stores, [1, 1, 1])
