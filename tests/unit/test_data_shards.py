"""The store's files: shards complete or absent, one index over them, opened without reading them."""

from __future__ import annotations

import pickle
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from stack.data.shards import INDEX, ShardWriter, StoreWriter, join_shards, read_record, unit_paths
from stack.data.store import INFO, UNITS, StoreInfo, TokenStore, shard_path
from stack.data.summary import describe, draw_lengths
from stack.errors import DataError
from tests.prepare_opening import write_large_store
from tests.stores import store_of_ids

ABOUT: dict = {"source": "test", "text": None, "text_bytes": 0, "tokenizer": None, "eos_id": None}


def write_shards(folder: Path, shards: list[list[list[int]]], masked: bool = False) -> TokenStore:
    """A store of these shards; a document without an end goes on in the next one and is written [..., -1]."""
    records = []
    for number, documents in enumerate(shards):
        writer = ShardWriter(folder, number, 100)
        for place, ids in enumerate(documents):
            whole = ids[-1:] != [-1]
            kept = np.array(ids if whole else ids[:-1], dtype=np.int64)
            writer.append(kept, kept % 2 == 0 if masked else None)
            if whole:
                writer.end_document(f"{number} {place}")
        records.append(writer.commit())
    join_shards(folder, records, num_ids=100, **ABOUT)
    return TokenStore(folder)


SHARDS = [[[1, 2, 3], [4, -1]], [[5, 6, -1]], [], [[7], [8, 9]]]


@pytest.mark.parametrize("masked", [False, True])
def test_reading_over_the_bounds_of_shards(tmp_path: Path, masked: bool) -> None:
    store = write_shards(tmp_path, SHARDS, masked)
    assert store.offsets.tolist() == [0, 3, 7, 9] and store.info.shards == [4, 2, 0, 3]
    for begin in range(10):
        for end in range(begin, 10):
            ids = store.read(begin, end)
            assert ids.tolist() == list(range(begin + 1, end + 1)) and ids.dtype == np.int64
            targets = store.read_targets(begin, end)
            assert (targets is not None) == masked
            if targets is not None:
                assert targets.tolist() == [one % 2 == 0 for one in range(begin + 1, end + 1)]
    for outside in ((-1, 2), (8, 10), (3, 2)):
        with pytest.raises(IndexError):
            store.read(*outside)
    assert pickle.loads(pickle.dumps(store)).read(2, 8).tolist() == [3, 4, 5, 6, 7, 8]
    assert store.info.lengths == [0, 2, 1], "two of 2 to 3 tokens, one of 4 to 7"


def test_content_tells_ids_boundaries_and_targets_apart(tmp_path: Path) -> None:
    variants = [
        ([[[1, 2], [3]]], False),
        ([[[1], [2, 3]]], False),
        ([[[1, 2], [4]]], False),
        ([[[1, 2], [3]]], True),
    ]
    found = [write_shards(tmp_path / str(n), *one).info.content for n, one in enumerate(variants)]
    assert len(set(found)) == len(variants)
    assert write_shards(tmp_path / "again", *variants[0]).info.content == found[0]


def test_a_shard_is_complete_or_absent(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 0, 100)
    writer.append(np.array([1, 2]))
    assert read_record(tmp_path, 0) is None and not shard_path(tmp_path, 0).exists()
    writer.discard()
    assert not list(tmp_path.rglob("*.part"))
    again = ShardWriter(tmp_path, 0, 100)
    again.append(np.array([1, 2]))
    again.end_document("a")
    record = again.commit(text_bytes=7)
    assert read_record(tmp_path, 0) == record and (record.num_tokens, record.text_bytes) == (2, 7)
    assert np.fromfile(unit_paths(tmp_path, 0)[0], INDEX)["end"].tolist() == [2]
    again.discard()
    assert shard_path(tmp_path, 0).exists(), "what has its name stays"


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for number, bad in enumerate(([10], [-1])):
        writer = ShardWriter(tmp_path, number, num_ids=10)
        writer.append(np.array([0, 9]))
        writer.append(np.array(bad))
        with pytest.raises(DataError, match="expected 0 to 9"):
            writer.commit()
        writer.discard()


def test_targets_go_with_every_append_or_none(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 0, 10)
    writer.append(np.array([1]), np.array([True]))
    for targets in (None, np.array([True, False])):
        with pytest.raises(ValueError, match="one for each id"):
            writer.append(np.array([1]), targets)
    writer.discard()


@pytest.mark.parametrize(("num_ids", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_ids_take_the_bytes_that_they_need(tmp_path: Path, num_ids: int, width: int) -> None:
    store = store_of_ids(tmp_path / "store", [[num_ids - 1, 0]], num_ids)
    assert store.read(0, 2).tolist() == [num_ids - 1, 0]
    assert shard_path(store.folder, 0).stat().st_size == 2 * width


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    store = write_shards(tmp_path, SHARDS)
    shard_path(tmp_path, 3).write_bytes(b"\0" * 10)
    with pytest.raises(DataError, match=r"00003\.bin has 10 bytes, not 6.*delete the folder"):
        TokenStore(tmp_path)
    shard_path(tmp_path, 3).unlink()
    with pytest.raises(DataError, match=r"00003\.bin has no bytes"):
        TokenStore(tmp_path)
    with pytest.raises(DataError, match="no whole token store"):
        store.read(7, 9)
    (tmp_path / INFO).write_text('{"format": 1}')
    with pytest.raises(DataError, match="format 1, this version reads 2"):
        TokenStore(tmp_path)
    (tmp_path / INFO).unlink()
    with pytest.raises(DataError, match="no whole token store"):
        TokenStore(tmp_path)


def test_more_shards_than_maps_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack.data.store.OPEN_SHARDS", 2)
    store = write_shards(tmp_path, [[[n, n + 1]] for n in range(20)])
    assert store.read(0, 40).tolist() == [n + k for n in range(20) for k in (0, 1)]


def test_ten_million_documents_open_without_being_read(tmp_path: Path) -> None:
    """160 MB of index, none of which is in memory behind the opening."""
    write_large_store(tmp_path, num_documents=10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tracemalloc.start()
    store = TokenStore(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    touched = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
    assert store.num_documents == 10_000_000 and peak < 1 << 20
    assert touched < 10 << 20, "pages of maps that were read would count here"
    assert store.read(int(store.offsets[9_999_999]), store.num_tokens).tolist() == [1, 1]


def test_a_picture_of_the_lengths(tmp_path: Path) -> None:
    store = store_of_ids(tmp_path / "store", [[1] * length for length in (1, 2, 3, 900, 1000, 5000)])
    assert "shortest 1 to 1, median 2 to 3, longest 4,096 to 8,191" in describe(store)
    draw_lengths(store, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG" and not list(tmp_path.glob("*.part"))


def test_a_writer_of_a_whole_store(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, 10)
    writer.append(np.array([1, 2]))
    writer.end_document("a")
    writer.end_document("without ids")
    info = writer.finish(**ABOUT)
    assert isinstance(info, StoreInfo) and (info.num_documents, info.num_tokens) == (1, 2)
    assert not (tmp_path / UNITS).exists()
