"""A rank's slice, read straight from the store, is to the bit what cutting the whole row would give it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stack.config.schema_data import DataConfig
from stack.data import documents
from stack.data.batch import IGNORE, MicroBatch
from stack.data.loader import Loader
from stack.data.part import PackedPart
from stack.data.slices import Slicer
from stack.data.store import TokenStore
from stack.errors import DataError
from stack.parallel.shard_batch import shard_batch
from tests.stores import counting_store, store_of_ids
from tests.whole_rows import whole_batch, whole_rows

SPS = (1, 2, 3, 4, 8)
PACKINGS = ("concat", "best_fit", "document")
FIELDS = ("input_ids", "labels", "position_ids", "cu_seqlens")


def masked_store(folder: Path, lengths: list[int], targets: list[list[int]]) -> TokenStore:
    """Documents whose ids count through the store, of which only those tokens may be predicted that `targets` names."""
    ends = np.cumsum([0, *lengths])
    ids = [list(range(a, b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    masks = [
        [place in wanted for place in range(length)] for length, wanted in zip(lengths, targets, strict=True)
    ]
    return store_of_ids(folder, ids, targets=masks)


def assert_equal(got: MicroBatch, want: MicroBatch, case: object) -> None:
    for name in FIELDS:
        assert getattr(got, name).dtype == getattr(want, name).dtype, (case, name)
        assert torch.equal(getattr(got, name), getattr(want, name)), (case, name)
    assert got.row_tokens == want.row_tokens, case


def compare(store: TokenStore, chosen: list[int], data: DataConfig, micro_batch: int) -> None:
    part = PackedPart(store, data)
    rows = whole_rows(store, chosen, data.packing, data.seq_len)
    assert part.num_rows == len(rows)
    for begin in range(0, len(rows), micro_batch):
        mine = list(range(begin, min(begin + micro_batch, len(rows))))
        whole = whole_batch(store, [rows[row] for row in mine], micro_batch, data.seq_len)
        for sp in (sp for sp in SPS if sp <= data.seq_len):
            for rank in range(sp):
                slicer = Slicer(data.seq_len, sp, rank)
                got = slicer.micro_batch([(part, row) for row in mine], micro_batch, part.pad_id)
                assert_equal(got, shard_batch(whole, sp, rank), (data.packing, data.seq_len, mine, sp, rank))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seq_len", [8, 24, 23, 13, 5])
def test_slices_are_the_cut_rows_bit_for_bit(tmp_path: Path, packing: str, seq_len: int) -> None:
    """Boundaries inside a slice, on its edge, and documents longer than a slice; lengths that no rank count divides."""
    lengths = [10, 14, 12, 12, 1, 23, 4, 14, 6, 1, 1, 40, 3]
    store = counting_store(tmp_path / "s", lengths)
    data = DataConfig(packing=packing, seq_len=seq_len, eval_fraction=0.0)  # type: ignore[arg-type]
    for micro_batch in (1, 2):
        compare(store, list(range(len(lengths))), data, micro_batch)


@pytest.mark.parametrize("packing", PACKINGS)
def test_random_stores(tmp_path: Path, packing: str) -> None:
    generator = np.random.default_rng(5)
    for case in range(6):
        lengths = generator.integers(1, 20, size=int(generator.integers(1, 12))).tolist()
        store = counting_store(tmp_path / str(case), lengths)
        data = DataConfig(packing=packing, seq_len=int(generator.integers(2, 18)), eval_fraction=0.0)  # type: ignore[arg-type]
        compare(store, list(range(len(lengths))), data, 2)


@pytest.mark.parametrize("packing", PACKINGS)
def test_targets_of_a_mask_on_every_rank(tmp_path: Path, packing: str) -> None:
    """Each document has a target in each row that it lies in, so that no row is left out."""
    lengths, targets = [5, 9, 3, 7], [[2, 3], [1, 4, 5, 8], [2], [0, 6, 4]]
    store = masked_store(tmp_path / "s", lengths, targets)
    data = DataConfig(packing=packing, seq_len=5, eval_fraction=0.0)  # type: ignore[arg-type]
    compare(store, [0, 1, 2, 3], data, 2)
    part = PackedPart(store, data)
    batch = Slicer(5).micro_batch([(part, row) for row in range(part.num_rows)], part.num_rows, 0)
    labels = sorted(batch.labels[batch.labels != IGNORE].tolist())
    assert labels == [2, 3, 6, 9, 10, 13, 16, 21, 23], "the marked tokens, but for the first of a document"
    assert part.account.targets == len(labels)


def test_documents_and_rows_without_a_target_are_dropped_and_counted(tmp_path: Path) -> None:
    """The second document has none but its first token; of the third, cut in three, the middle piece has none."""
    lengths, targets = [4, 3, 12, 2], [[1, 3], [0], [1, 2, 10], [1]]
    store = masked_store(tmp_path / "s", lengths, targets)
    data = DataConfig(packing="document", seq_len=4, eval_fraction=0.0)
    part = PackedPart(store, data)
    account = part.account
    assert account.dropped == (
        "1 documents without a target (3 tokens)",
        "1 rows without a target (4 tokens)",
    )
    assert (account.documents, account.tokens, account.rows, account.targets) == (3, 14, 4, 6)
    assert [part.pieces(row).begins.tolist() for row in range(part.num_rows)] == [[0], [7], [15], [19]]
    joined = PackedPart(store, DataConfig(packing="concat", seq_len=4, eval_fraction=0.0))
    assert [joined.pieces(row).begins.tolist() for row in range(joined.num_rows)] == [[0], [7], [15], [19]]
    packed = PackedPart(store, DataConfig(packing="best_fit", seq_len=4, eval_fraction=0.0))
    assert sorted(packed.pieces(row).begins.tolist() for row in range(packed.num_rows)) == [
        [0],
        [7],
        [15],
        [19],
    ]


@pytest.mark.parametrize("packing", PACKINGS)
def test_random_masks_against_a_plain_count(tmp_path: Path, packing: str) -> None:
    """Dropped rows are those that have no target; what is counted is what the rows hold."""
    generator = np.random.default_rng(8)
    for case in range(8):
        lengths = generator.integers(1, 25, size=int(generator.integers(3, 20))).tolist()
        targets = [[place for place in range(length) if generator.random() < 0.1] for length in lengths]
        targets[0] = list(range(lengths[0]))
        store = masked_store(tmp_path / str(case), lengths, targets)
        data = DataConfig(packing=packing, seq_len=5, eval_fraction=0.0)  # type: ignore[arg-type]
        kept = [document for document, wanted in enumerate(targets) if set(wanted) - {0}]
        part = PackedPart(store, data)
        rows = whole_rows(store, kept, packing, 5)
        whole = [whole_batch(store, [row], 1, 5) for row in rows]
        wanted = [batch for batch in whole if batch.num_targets]
        assert part.num_rows == len(wanted) and part.account.targets == sum(
            batch.num_targets for batch in wanted
        )
        assert part.account.tokens == sum(batch.row_tokens[0] for batch in wanted)
        for row, batch in enumerate(wanted):
            assert_equal(Slicer(5).micro_batch([(part, row)], 1, part.pad_id), batch, (case, row))


@pytest.mark.parametrize("scan", [1, 7, 64])
def test_targets_are_counted_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: int
) -> None:
    """Stretches longer than what is looked at in one go, neighbours, and far apart."""
    monkeypatch.setattr(documents, "SCAN_TOKENS", scan)
    monkeypatch.setattr(documents, "GAP_TOKENS", 3)
    flags = np.random.default_rng(4).random(200) < 0.4
    store = store_of_ids(tmp_path / "s", [range(200)], targets=[flags.tolist()])
    begins, ends = np.array([0, 3, 3, 10, 50, 90, 180]), np.array([2, 3, 9, 48, 51, 179, 200])
    want = [int(flags[a:b].sum()) for a, b in zip(begins, ends, strict=True)]
    assert documents.count_targets(store, begins, ends).tolist() == want


def test_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    store = masked_store(tmp_path / "s", [4, 3], [[0], []])
    with pytest.raises(DataError, match=r"nothing is left .* 2 documents without a target \(7 tokens\)"):
        Loader(store, DataConfig(seq_len=4, eval_fraction=0.0), dp=1, dp_rank=0, accumulation=1, seed=1)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("sp", SPS)
def test_a_rank_reads_only_its_slice_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, sp: int
) -> None:
    """Of each row its own tokens and the one behind them. Figures at scale: python -m tests.feeding_scale."""
    seq_len, read = 64, []
    store = counting_store(tmp_path / "s", [300, 20, 64, 7, 9, 500, 41])
    data = DataConfig(packing=packing, seq_len=seq_len, eval_fraction=0.0)  # type: ignore[arg-type]
    part = PackedPart(store, data)
    plain = store.read
    monkeypatch.setattr(store, "read", lambda begin, end: read.append(end - begin) or plain(begin, end))
    seq_local = -(-seq_len // sp)
    for row in range(part.num_rows):
        tokens = int(part.pieces(row).lengths.sum())
        for rank in range(sp):
            read.clear()
            Slicer(seq_len, sp, rank).micro_batch([(part, row)], 1, 0)
            low = rank * seq_local
            own = max(0, min(seq_local, tokens - low))
            assert own <= sum(read) <= own + 1, (row, rank)
