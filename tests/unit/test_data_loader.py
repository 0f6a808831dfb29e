"""Steps, epochs, positions that are saved, and evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stack.config.schema_data import DataConfig
from stack.data.documents import Documents
from stack.data.loader import EvalLoader, Loader
from stack.data.store import TokenStore
from stack.errors import DataError
from tests.stores import counting_store

SEQ = 4
DATA = DataConfig(seq_len=SEQ, eval_fraction=0.0)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    """Six full rows."""
    return counting_store(tmp_path / "six", [SEQ * 6])


def make(store: TokenStore, data: DataConfig = DATA, **changes: int | None) -> Loader:
    settings = {"dp": 1, "dp_rank": 0, "accumulation": 1, "seed": 1, "epochs": 2} | changes
    return Loader(store, data, **settings)  # pyright: ignore[reportArgumentType]


def rows_of(loader: Loader, num_steps: int = 10**6) -> list[list[int]]:
    """First ids of the rows of each step; 0 only for the row that starts there or for padding."""
    steps = []
    while len(steps) < num_steps and (batches := loader.next_step()) is not None:
        steps.append([int(row[0]) for batch in batches for row in batch.input_ids])
    return steps


def test_an_incomplete_last_window_is_a_smaller_step(store: TokenStore) -> None:
    loader = make(store, accumulation=4)
    assert loader.num_rows == 6 and loader.steps_per_epoch == 2
    steps = rows_of(loader)
    assert [len(rows) for rows in steps] == [4, 2, 4, 2], "nothing is carried into the second epoch"
    for first, second in (steps[:2], steps[2:]):
        assert sorted(first + second) == [SEQ * row for row in range(6)]
    assert loader.next_step() is None


def test_ranks_end_together_with_padding(tmp_path: Path) -> None:
    """Five rows on four ranks: the last step gives one rank a row and the others a batch without targets."""
    store = counting_store(tmp_path / "five", [SEQ * 5])
    ranks = [make(store, dp=4, dp_rank=rank, epochs=1) for rank in range(4)]
    steps = [[loader.next_step() for loader in ranks] for _ in range(3)]
    assert [[len(batches or []) for batches in step] for step in steps] == [[1] * 4, [1] * 4, [0] * 4]
    assert steps[2] == [None] * 4
    last = [batches[0].num_targets for batches in steps[1] if batches]
    assert last[1:] == [0, 0, 0] and last[0] >= SEQ - 1


def test_micro_batches_of_several_rows_keep_their_shape(store: TokenStore) -> None:
    loader = make(store, replace(DATA, micro_batch=4), epochs=1)
    shapes = []
    while (batches := loader.next_step()) is not None:
        shapes += [tuple(batch.input_ids.shape) for batch in batches]
    assert shapes == [(4, SEQ), (4, SEQ)]


def test_any_split_takes_the_same_rows_in_a_step(store: TokenStore) -> None:
    """Four rows a step as accumulation, as ranks and as rows of a micro-batch."""
    splits = [(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2)]
    found = []
    for dp, accumulation, micro_batch in splits:
        data = replace(DATA, micro_batch=micro_batch)
        ranks = [
            rows_of(make(store, data, dp=dp, dp_rank=rank, accumulation=accumulation, epochs=1))
            for rank in range(dp)
        ]
        found.append([sorted(row for rank in ranks for row in rank[step] if row) for step in range(2)])
    assert all(steps == found[0] for steps in found)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_resume_twice_at_every_step(store: TokenStore, accumulation: int) -> None:
    whole = rows_of(make(store, accumulation=accumulation, epochs=3))
    for first in range(len(whole) + 1):
        loader = make(store, accumulation=accumulation, epochs=3)
        assert rows_of(loader, first) == whole[:first]
        for second in range(first, len(whole) + 1):
            again = make(store, accumulation=accumulation, epochs=3)
            again.load_state(json.loads(json.dumps(loader.state())))
            assert rows_of(again, second - first) == whole[first:second]
            last = make(store, accumulation=accumulation, epochs=3)
            last.load_state(again.state())
            assert rows_of(last) == whole[second:]


@pytest.mark.parametrize("ranks", [1, 4])
def test_resume_at_another_rank_count(store: TokenStore, ranks: int) -> None:
    """Saved by two ranks after each step, gone on with by one or four: every row of the epoch once."""
    for stop in range(4):
        before, states = [], []
        for rank in range(2):
            loader = make(store, dp=2, dp_rank=rank, epochs=1)
            before += rows_of(loader, stop)
            states.append(loader.state())
        assert states[0] == states[1], "the position is the same on every rank"
        after = []
        for rank in range(ranks):
            loader = make(store, dp=ranks, dp_rank=rank, epochs=1)
            loader.load_state(states[0])
            after += rows_of(loader)
        seen = [row for rows in before + after for row in rows]
        assert sorted(row for row in seen if row) == [SEQ * row for row in range(1, 6)]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seq_len": 8}, "seq_len was 4 and is 8"),
        ({"packing": "document"}, "packing"),
        ({"shuffle": False}, "shuffle"),
        ({"eval_fraction": 0.1}, "eval_fraction"),
    ],
)
def test_a_position_of_other_rows_is_refused(store: TokenStore, change: dict, name: str) -> None:
    state = make(store).state()
    with pytest.raises(DataError, match=name):
        make(store, replace(DATA, **change)).load_state(state)


def test_a_position_of_another_text_or_seed_is_refused(store: TokenStore, tmp_path: Path) -> None:
    state = make(store).state()
    with pytest.raises(DataError, match="content was"):
        make(counting_store(tmp_path / "other", [SEQ * 3, SEQ * 3])).load_state(state)
    with pytest.raises(DataError, match="seed was 1 and is 2"):
        make(store, seed=2).load_state(state)


def test_the_same_text_elsewhere_is_accepted(store: TokenStore, tmp_path: Path) -> None:
    loader = make(store)
    rows_of(loader, 2)
    copy = make(counting_store(tmp_path / "copy", [SEQ * 6]))
    copy.load_state(loader.state())
    assert rows_of(copy) == rows_of(loader)


@pytest.mark.parametrize(("packing", "lengths"), [("concat", [2, 1]), ("document", [1, 1])])
def test_too_little_text_is_refused(tmp_path: Path, packing: str, lengths: list[int]) -> None:
    store = counting_store(tmp_path / "small", lengths)
    with pytest.raises(DataError, match=r"do not fill one row of data\.seq_len=4"):
        make(store, replace(DATA, packing=packing))


def numbers(store: TokenStore, eval_fraction: float, held_out: bool = False) -> list[int]:
    """Documents of a part, looked at in blocks that do not divide their number."""
    documents = Documents(store, held_out=held_out, eval_fraction=eval_fraction, block=64)
    return [number for index in range(documents.num_blocks) for number in documents.numbers(index).tolist()]


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_evaluation_sees_the_same_rows_at_any_split(tmp_path: Path, dp: int, micro_batch: int) -> None:
    """Documents of 7, 16 and 33 tokens and more; as many batches on each rank, also where rows do not
    divide."""
    store = counting_store(tmp_path / "docs", [7, 16, 33] * 20)
    data = replace(DATA, eval_fraction=0.3, micro_batch=micro_batch)
    assert 5 < len(numbers(store, 0.3, held_out=True)) < 35
    ranks = [EvalLoader(store, data, dp=dp, dp_rank=rank, max_rows=11) for rank in range(dp)]
    batches = [list(loader) for loader in ranks]
    assert {len(rank) for rank in batches} == {len(ranks[0])}
    targets = [
        label for rank in batches for batch in rank for label in batch.labels.flatten().tolist() if label > 0
    ]
    reference = [
        label
        for batch in EvalLoader(
            store, DataConfig(seq_len=SEQ, eval_fraction=0.3), dp=1, dp_rank=0, max_rows=11
        )
        for label in batch.labels.flatten().tolist()
        if label > 0
    ]
    assert sorted(targets) == sorted(reference) and len(reference) > 20
    assert [batch.labels.tolist() for batch in ranks[0]] == [batch.labels.tolist() for batch in batches[0]]


def test_no_document_is_in_both_parts(tmp_path: Path) -> None:
    store = counting_store(tmp_path / "many", [5] * 1000)
    train, held_out = numbers(store, 0.2), numbers(store, 0.2, held_out=True)
    assert not set(train) & set(held_out) and len(train) + len(held_out) == 1000
    assert 140 < len(held_out) < 260 and 0 in train
    fewer = numbers(store, 0.1, held_out=True)
    assert set(fewer) < set(held_out), "a smaller share holds out some of the same documents"
    assert numbers(store, 0.0, held_out=True) == [] and len(numbers(store, 0.0)) == 1000


def test_an_empty_held_out_part_is_said(store: TokenStore) -> None:
    loader = EvalLoader(store, replace(DATA, eval_fraction=0.5), dp=1, dp_rank=0, max_rows=16)
    assert list(loader) == [] and len(loader) == 0
    assert "no document" in loader.describe()


def test_documents_of_the_last_step_are_named_with_their_tokens_on_all_ranks(tmp_path: Path) -> None:
    """Documents of 3, 6 and 3 tokens in rows of 4: what each rank tells is the whole step, not its part."""
    store = counting_store(tmp_path / "three", [3, 6, 3])
    for rank in range(2):
        loader = make(store, replace(DATA, shuffle=False), dp=2, dp_rank=rank)
        loader.next_step()
        place = f"of test ({store.folder}), tokens"
        assert loader.describe_last_step() == [
            f"row 0: document 0 {place} 0 to 2",
            f"row 0: document 1 {place} 0 to 0",
            f"row 1: document 1 {place} 1 to 4",
        ]
