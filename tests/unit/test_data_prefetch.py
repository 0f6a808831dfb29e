"""Steps read ahead by threads: the same steps in the same order, errors as they were raised, a clean end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stack.config.schema_data import DataConfig
from stack.data.loader import Loader
from stack.data.prefetch import Prefetcher
from stack.data.store import TokenStore
from stack.errors import DataError
from tests.data_resumes import run
from tests.stores import counting_store

DATA = DataConfig(seq_len=8, eval_fraction=0.0)
WAIT_S = 30.0


def steps(
    calls: list[Callable[[], Any]], count: int = 10**6
) -> Iterator[tuple[int, list[Callable[[], Any]]]]:
    for number in range(count):
        yield number, calls


def test_random_resumes_read_the_same_tokens(tmp_path: Path) -> None:
    """More of them: python -m tests.data_resumes --resumes 200."""
    assert run(24, 3, tmp_path) >= 24


def make(store: TokenStore, workers: int, prefetch: int = 2) -> Loader:
    data = replace(DATA, workers=workers, prefetch=prefetch, micro_batch=2)
    return Loader(store, data, dp=1, dp_rank=0, accumulation=2, seed=1, epochs=2)


@pytest.mark.parametrize("packing", ["concat", "best_fit", "document"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_at_any_step_loses_no_token(tmp_path: Path, workers: int, packing: str) -> None:
    """Twelve steps over an epoch's end, with documents that rows cut; broken off at each, with steps read ahead."""
    store = counting_store(tmp_path / "s", [5, 30, 1, 17, 33, 2])
    data = replace(DATA, packing=packing, workers=workers)  # type: ignore[arg-type]
    settings = {"dp": 1, "dp_rank": 0, "accumulation": 2, "seed": 1}

    def tokens(loader: Loader, count: int) -> list[list[int]]:
        return [
            [*batch.input_ids.flatten().tolist()] for _ in range(count) for batch in loader.next_step() or []
        ]

    straight = Loader(store, data, **settings)  # type: ignore[arg-type]
    whole = tokens(straight, 12)
    assert straight.state()["epoch"] >= 1
    for stop in range(1, 13):
        first, second = (Loader(store, data, **settings) for _ in range(2))  # type: ignore[arg-type]
        before = tokens(first, stop)
        second.load_state(first.state())
        assert before + tokens(second, 12 - stop) == whole
        first.close()
        second.close()
    straight.close()


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize(
    ("packing", "too_long", "kept"),
    [
        ("concat", "split", 1012),
        ("document", "split", 1012),
        ("best_fit", "split", 1012),
        ("best_fit", "drop", 12),
    ],
)
def test_tails_of_long_documents_are_read_or_counted(
    tmp_path: Path, workers: int, packing: str, too_long: str, kept: int
) -> None:
    """Documents of 1, 4, 7 and 1000 tokens in rows of 8."""
    store = counting_store(tmp_path / "s", [1, 4, 7, 1000])
    data = replace(DATA, packing=packing, too_long=too_long, workers=workers, shuffle=packing == "best_fit")  # type: ignore[arg-type]
    loader = Loader(store, data, dp=1, dp_rank=0, accumulation=3, seed=1, epochs=1)
    seen = []
    while (batches := loader.next_step()) is not None:
        for batch in batches:
            seen += batch.input_ids[0, : batch.row_tokens[0]].tolist()
    loader.close()
    assert (sorted(seen) if packing == "best_fit" else seen) == list(range(kept))
    said = "1 documents longer than a row (1,000 tokens)" if kept == 12 else "nothing dropped"
    assert said in str(loader.account) and loader.account.tokens == kept


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_batches(tmp_path: Path, workers: int) -> None:
    store = counting_store(tmp_path / "s", [5, 30, 1, 17, 64, 2, 2, 40])
    inline, ahead = make(store, 0), make(store, workers, 3)
    while (want := inline.next_step()) is not None:
        got = ahead.next_step()
        assert got is not None and len(got) == len(want) and ahead.state() == inline.state()
        for mine, other in zip(got, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(vars(mine).values(), vars(other).values(), strict=True) if
                       isinstance(a, torch.Tensor))  # fmt: skip
            assert mine.row_tokens == other.row_tokens
        assert ahead.describe_last_step() == inline.describe_last_step()
    assert ahead.next_step() is None and ahead.next_step() is None
    ahead.close()


def test_steps_are_worked_out_while_the_loop_is_busy() -> None:
    """Behind the first step, `depth` more are done although nobody asks for them, and no further one."""
    done, third = [], threading.Event()

    def call() -> int:
        done.append(len(done))
        if len(done) == 3:
            third.set()
        return done[-1]

    ahead: Prefetcher[int, int] = Prefetcher(1, 2)
    ahead.start(steps([call]))
    assert ahead.next() == (0, [0])
    assert third.wait(WAIT_S)
    ahead.close()
    assert done == [0, 1, 2]


def test_the_order_holds_when_later_calls_end_first() -> None:
    slow = threading.Event()

    def first() -> str:
        assert slow.wait(WAIT_S)
        return "first"

    def second() -> str:
        slow.set()
        return "second"

    ahead: Prefetcher[int, str] = Prefetcher(2, 2)
    ahead.start(steps([first, second], 2))
    assert [ahead.next(), ahead.next(), ahead.next()] == [
        (0, ["first", "second"]),
        (1, ["first", "second"]),
        None,
    ]
    ahead.close()


class Broken:
    """A store that cannot be read from some token on until it is mended."""

    def __init__(self, store: TokenStore, place: int):
        self._store, self._place, self.error = store, place, DataError("the disk is gone")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, begin: int, end: int) -> Any:
        if begin >= self._place:
            raise self.error
        return self._store.read(begin, end)

    def mend(self) -> None:
        self._place = self._store.num_tokens


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_a_worker_raises_reaches_the_loop_as_it_is_and_no_step_is_lost(
    tmp_path: Path, workers: int
) -> None:
    store = counting_store(tmp_path / "s", [8 * 12])
    broken: Any = Broken(store, 40)
    data = replace(DATA, workers=workers, shuffle=False)
    loader = Loader(broken, data, dp=1, dp_rank=0, accumulation=2, seed=1, epochs=1)
    for _ in range(2):
        loader.next_step()
    state = loader.state()
    with pytest.raises(DataError) as caught:
        loader.next_step()
    assert caught.value is broken.error and loader.state() == state
    broken.mend()
    batches = loader.next_step()
    assert batches is not None and [int(batch.input_ids[0, 0]) for batch in batches] == [32, 40]
    loader.close()


@pytest.mark.parametrize("workers", [1, 4])
def test_closing_leaves_no_thread_and_drops_what_was_read_ahead(tmp_path: Path, workers: int) -> None:
    before = set(threading.enumerate())
    loader = make(counting_store(tmp_path / "s", [8 * 100]), workers, 5)
    loader.next_step()
    assert set(threading.enumerate()) - before
    state = loader.state()
    loader.close()
    assert set(threading.enumerate()) == before and loader.state() == state


def test_going_back_drops_what_was_read_ahead(tmp_path: Path) -> None:
    loader = make(counting_store(tmp_path / "s", [8 * 100]), 2, 5)
    loader.next_step()
    state, seen = loader.state(), []
    for _ in range(2):
        loader.load_state(state)
        seen.append([[batch.input_ids.tolist() for batch in loader.next_step() or []] for _ in range(3)])
    assert seen[0] == seen[1]
    loader.close()
