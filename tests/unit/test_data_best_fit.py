"""Best-fit decreasing: against the plain algorithm, in blocks, at scale, and for ever the same."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stack.config.schema_data import DataConfig
from stack.data.best_fit import BestFitRows, best_fit, block_size
from stack.data.documents import BLOCK, Documents
from stack.data.loader import Loader
from stack.data.part import PackedPart
from stack.errors import DataError
from tests.stores import counting_store, sparse_store

DATA = DataConfig(packing="best_fit", seq_len=8, eval_fraction=0.0)


def one_after_the_other(lengths: list[int], seq_len: int) -> list[int]:
    """Tokens in each row, by the definition: each item into the fullest row with room for it."""
    filled: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [row for row, tokens in enumerate(filled) if tokens + length <= seq_len]
        if fits:
            filled[max(fits, key=lambda row: filled[row])] += length
        else:
            filled.append(length)
    return sorted(filled)


def rows_of(lengths: list[int], seq_len: int) -> list[list[int]]:
    order, ends = best_fit(np.array(lengths, np.int64), seq_len)
    return [order[a:b].tolist() for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def test_rows_are_as_full_as_the_definition_makes_them() -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        seq_len = int(generator.integers(1, 40))
        lengths = generator.integers(1, seq_len + 1, size=int(generator.integers(1, 60))).tolist()
        rows = rows_of(lengths, seq_len)
        assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
        assert sorted(sum(lengths[item] for item in row) for row in rows) == one_after_the_other(
            lengths, seq_len
        )


def test_rows_are_the_same_for_ever() -> None:
    """A run that resumes after an upgrade must see the rows it started with."""
    assert rows_of([3, 8, 1, 5, 2, 2, 7, 4, 1, 6], 8) == [[1], [6, 2], [9, 4], [3, 0], [7, 5, 8]]


def test_documents_are_whole_and_longer_ones_fill_rows_of_their_own(tmp_path: Path) -> None:
    """19 tokens are two full rows and 3; 8 and 16 are full rows alone."""
    part = PackedPart(counting_store(tmp_path / "s", [5, 19, 8, 3, 16, 2]), DATA)
    found = [part.pieces(row) for row in range(part.num_rows)]
    pieces = [
        list(zip(row.begins.tolist(), row.lengths.tolist(), row.goes_on.tolist(), strict=True))
        for row in found
    ]
    assert pieces == [
        [(5, 8, True)], [(13, 8, True)], [(24, 8, False)], [(35, 8, True)], [(43, 8, False)],
        [(0, 5, False), (21, 3, False)], [(32, 3, False), (51, 2, False)],
    ]  # fmt: skip
    account = part.account
    assert (account.documents, account.tokens, account.cut, account.padding) == (6, 53, 2, 3)


def test_rows_of_several_blocks(tmp_path: Path) -> None:
    """Every token once, whatever the block; a row holds documents of one block only."""
    generator = np.random.default_rng(2)
    lengths = generator.integers(1, 20, size=203).tolist()
    store = counting_store(tmp_path / "s", lengths)
    for block in (8, 64, 1024):
        rows = BestFitRows(Documents(store, block=block), 8)
        pieces = rows.pieces(0, rows.num_rows)
        tokens = Counter(
            token
            for begin, length in zip(pieces.begins, pieces.lengths, strict=True)
            for token in range(begin, begin + length)
        )
        assert tokens == Counter(range(sum(lengths)))
        assert np.bincount(pieces.rows, pieces.lengths).max() <= 8
        for row in range(rows.num_rows):
            alone = rows.pieces(row, row + 1)
            assert all(
                np.array_equal(mine, whole[pieces.rows == row])
                for mine, whole in zip(alone, pieces, strict=True)
            )
            documents = np.searchsorted(store.offsets, alone.begins, side="right") - 1
            assert len(set(documents // block)) == 1


def test_a_block_fills_many_rows(tmp_path: Path) -> None:
    store = counting_store(tmp_path / "s", [50] * 100)
    assert block_size(store, 100) == BLOCK
    assert block_size(store, 50 * BLOCK) == 256 * BLOCK // 4, (
        "bounded: its boundaries are held while it is packed"
    )


def test_a_million_documents_need_no_index(tmp_path: Path) -> None:
    """Their boundaries alone are 8 MB; what is held grows by a bit each. More: python -m tests.feeding_scale."""
    lengths = np.random.default_rng(0).integers(1, 1000, size=1_000_000)
    store = sparse_store(tmp_path / "s", lengths)
    data = DataConfig(packing="concat", seq_len=4096, eval_fraction=0.05, workers=0)
    tracemalloc.start()
    try:
        loader = Loader(store, data, dp=4, dp_rank=1, accumulation=1, seed=1)
        held, peak = tracemalloc.get_traced_memory()
        batches = loader.next_step()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20 and peak < 4 << 20
    account = loader.account
    assert 0.93 < account.documents / 1_000_000 < 0.97 and account.padding < 4096
    assert batches is not None and batches[0].row_tokens == (4096,)


def test_packed_documents_are_held_in_two_bytes_each(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, size=100_000)
    part = PackedPart(sparse_store(tmp_path / "s", lengths), replace(DATA, seq_len=4096))
    rows = part._rows
    assert isinstance(rows, BestFitRows)
    blocks = [rows._pack(index) for index in range(part.documents.num_blocks)]
    assert len(blocks) == 7 and sum(block.packed.nbytes for block in blocks) == 2 * len(lengths)
    assert part.account.padding / part.account.tokens < 0.01


def test_long_documents_are_dropped_and_counted(tmp_path: Path) -> None:
    store = counting_store(tmp_path / "s", [5, 19, 8, 3, 16, 2])
    for packing, rows in (("best_fit", 3), ("document", 4), ("concat", 3)):
        part = PackedPart(store, replace(DATA, packing=packing, too_long="drop"))  # type: ignore[arg-type]
        account = part.account
        assert (account.documents, account.tokens, part.num_rows) == (4, 18, rows)
        assert account.dropped == ("2 documents longer than a row (35 tokens)",)
        assert "dropped: 2 documents longer than a row (35 tokens)" in str(account)


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    store = counting_store(tmp_path / "s", [9, 19])
    with pytest.raises(
        DataError, match=r"nothing is left .* dropped: 2 documents longer than a row \(28 tokens\)"
    ):
        Loader(store, replace(DATA, too_long="drop"), dp=1, dp_rank=0, accumulation=1, seed=1)
