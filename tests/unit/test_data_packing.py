"""Rows, labels, positions and boundaries, against a token-by-token account."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stack.config.schema_data import DataConfig
from stack.data.batch import IGNORE, MicroBatch
from stack.data.part import PackedPart
from stack.data.slices import Slicer
from stack.data.store import TokenStore
from tests.stores import counting_store, store_of_ids

LENGTHS = (1, 4, 7, 1000)


def part_of(store: TokenStore, packing: str, seq_len: int, too_long: str = "split") -> PackedPart:
    data = DataConfig(packing=packing, seq_len=seq_len, too_long=too_long, eval_fraction=0.0)  # type: ignore[arg-type]
    return PackedPart(store, data)


def all_rows(part: PackedPart) -> MicroBatch:
    rows = [(part, row) for row in range(part.num_rows)]
    return Slicer(part.seq_len).micro_batch(rows, part.num_rows, part.pad_id)


def real_tokens(batch: MicroBatch, lengths: tuple[int, ...]) -> list[int]:
    """Ids of all pieces but padding, in order. Ids of a counting store are unique, padding is 0."""
    flat, bounds = batch.input_ids.flatten().tolist(), batch.cu_seqlens.tolist()
    seq = batch.input_ids.shape[1]
    found: list[int] = []
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        padding = flat[begin:end] == [0] * (end - begin) and end % seq == 0 and begin > 0
        found += [] if padding else flat[begin:end]
    return found


@pytest.mark.parametrize("packing", ["concat", "document"])
@pytest.mark.parametrize("seq_len", [8, 5, 1, 2000])
def test_every_token_is_there_once_in_order(tmp_path: Path, packing: str, seq_len: int) -> None:
    part = part_of(counting_store(tmp_path / "s", LENGTHS), packing, seq_len)
    batch = all_rows(part)
    assert real_tokens(batch, LENGTHS) == list(range(sum(LENGTHS)))
    account = part.account
    assert account.tokens == sum(LENGTHS) and account.documents == 4
    assert account.rows * seq_len == account.tokens + account.padding
    expected = (
        -(-1012 // seq_len) if packing == "concat" else sum(-(-length // seq_len) for length in LENGTHS)
    )
    assert part.num_rows == expected


@pytest.mark.parametrize("packing", ["concat", "document"])
@pytest.mark.parametrize("seq_len", [8, 5, 1, 2000])
def test_labels_are_the_next_token_of_the_document(tmp_path: Path, packing: str, seq_len: int) -> None:
    """Each token but a document's first is a target once, at the position of the one before it, wherever rows
    are cut."""
    part = part_of(counting_store(tmp_path / "s", LENGTHS), packing, seq_len)
    batch = all_rows(part)
    has_target = batch.labels != IGNORE
    assert (batch.labels[has_target] == batch.input_ids[has_target] + 1).all()
    firsts = set(np.cumsum([0, *LENGTHS[:-1]]).tolist())
    assert sorted(batch.labels[has_target].tolist()) == sorted(set(range(sum(LENGTHS))) - firsts)
    assert batch.num_targets == part.account.targets == sum(LENGTHS) - 4


def test_targets_of_two_documents(tmp_path: Path) -> None:
    """Documents of 10 and 14 tokens in one row: 9 + 13 targets; with an end-of-text token behind each, 10 +
    14."""
    plain = part_of(counting_store(tmp_path / "a", [10, 14]), "concat", 24)
    ended = part_of(store_of_ids(tmp_path / "b", [[*range(10, 20), 0], [*range(30, 44), 0]]), "concat", 26)
    assert all_rows(plain).num_targets == 9 + 13
    batch = all_rows(ended)
    assert batch.num_targets == 10 + 14
    assert batch.labels[0, 10] == IGNORE and batch.labels[0, 9] == 0
    assert batch.cu_seqlens.tolist() == [0, 11, 26]


def test_shapes_positions_and_boundaries(tmp_path: Path) -> None:
    """Documents of 3, 6 and 1 tokens in rows of 4: the second one is cut, the last row is filled up."""
    part = part_of(counting_store(tmp_path / "s", [3, 6, 1]), "concat", 4)
    batch = all_rows(part)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert batch.labels.tolist() == [
        [1, 2, IGNORE, 4],
        [5, 6, 7, 8],
        [IGNORE, IGNORE, IGNORE, IGNORE],
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8, 9, 10, 12]
    assert str(batch.input_ids.dtype) == "torch.int64" and str(batch.cu_seqlens.dtype) == "torch.int32"
    assert part.account.padding == 2
    assert batch.row_tokens == (4, 4, 2)


def test_rows_of_padding(tmp_path: Path) -> None:
    part = part_of(counting_store(tmp_path / "s", [3]), "document", 4)
    batch = Slicer(4).micro_batch([], 2, part.pad_id)
    assert batch.input_ids.shape == (2, 4) and batch.num_targets == 0
    assert batch.row_tokens == (0, 0)
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2


def test_only_the_chosen_documents(tmp_path: Path) -> None:
    """Documents that are not chosen leave no trace, also between chosen ones."""
    part = part_of(counting_store(tmp_path / "s", [2, 5, 2]), "concat", 4, too_long="drop")
    batch = all_rows(part)
    assert batch.input_ids.tolist() == [[0, 1, 7, 8]]
    assert batch.labels.tolist() == [[1, IGNORE, 8, IGNORE]]
    assert part.account.dropped == ("1 documents longer than a row (5 tokens)",)


def test_random_documents_against_a_plain_loop(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for case in range(20):
        lengths = generator.integers(1, 12, size=generator.integers(1, 9)).tolist()
        seq_len = int(generator.integers(1, 10))
        batch = all_rows(part_of(counting_store(tmp_path / str(case), lengths), "concat", seq_len))
        ids, labels, positions = [], [], []
        token = 0
        for length in lengths:
            for nth in range(length):
                positions.append(0 if nth == 0 or token % seq_len == 0 else positions[-1] + 1)
                ids.append(token)
                labels.append(token + 1 if nth + 1 < length else IGNORE)
                token += 1
        assert batch.input_ids.flatten().tolist()[:token] == ids
        assert batch.labels.flatten().tolist()[:token] == labels
        assert batch.position_ids.flatten().tolist()[:token] == positions
