"""Sources cut into units: every document once, the same whatever the size of a unit, with its line and place; and the
sources of records and of ready ids."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from stack.config.schema_data import DataConfig
from stack.data.chunks import SAFE_CUT
from stack.data.megatron import DTYPES, HEADER, MAGIC, MegatronIndex, export_megatron
from stack.data.sources import SOURCES, Source, SourceRequest, Tally
from stack.data.sources import hf as hf_module
from stack.data.sources import jsonl as jsonl_module
from stack.data.sources import text as text_module
from stack.errors import DataError
from tests.stores import store_of_ids

TEXT = "".join(f"{n} words, 낱말 and some more; " + ("\n" if n % 7 == 0 else "") for n in range(400))


def open_source(name: str, path: Path | str, **changes: Any) -> Source:
    data = DataConfig(source=name, path=str(path), **changes)  # pyright: ignore[reportArgumentType]
    return SOURCES[name](SourceRequest(data, 70_000, 1))  # pyright: ignore[reportArgumentType]


def read(source: Source, size: int, policy: Any = "skip") -> tuple[dict[str, list], dict[str, int]]:
    """Place -> blocks of the document, put together from its units; reason -> count of what was left out."""
    tally = Tally(policy)
    found: dict[str, list] = {}
    goes_on: str | None = None
    units = source.units(size, SAFE_CUT, tally)
    source = pickle.loads(pickle.dumps(source))  # as a worker process has it
    for unit in units:
        for document in source.documents(unit, tally):
            assert document.place not in found or goes_on == document.place, "a document comes once"
            found.setdefault(document.place, []).extend(document.blocks())
            goes_on = document.place if document.goes_on else None
    assert goes_on is None, "the last unit ends its document"
    return found, {reason: entry.count for reason, entry in tally.dropped.items()}


def joined(found: dict[str, list]) -> dict[str, str]:
    return {place: "".join(blocks) for place, blocks in found.items()}


@pytest.mark.parametrize("size", [50, 333, 5000])
def test_a_large_file_of_text_goes_to_several_units(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 64)
    contents = {"a.txt": "short", "b.txt": TEXT, "c.txt": "end", "d.txt": TEXT[:700], "e.txt": " " * 900}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bad.txt").write_bytes(TEXT.encode() + b"\xac" + TEXT.encode())
    source = open_source("text", tmp_path)
    found, dropped = read(source, size)
    del contents["e.txt"]
    assert joined(found) == contents and list(found) == sorted(found)
    assert dropped == {"not UTF-8": 1, "blank": 1}
    units = [unit for unit in source.units(size, SAFE_CUT, Tally("skip")) if unit.end is not None]
    parts = [(TEXT.encode()[u.begin : u.end], u) for u in units if u.first == 1]
    assert len(parts) > 1
    for part, unit in parts[1:]:
        at = len(TEXT.encode()[: unit.begin].decode())
        assert SAFE_CUT.match(TEXT, at), "each cut is in front of a safe place"
        assert len(part) < 3 * size + 200
    assert all(unit.end is None for unit in source.units(size, None, Tally("skip"))), "whole for others"
    with pytest.raises(DataError, match=r"bad\.txt, line \d+, byte \d+: 0xAC"):
        read(source, size, "stop")


@pytest.mark.parametrize("size", [1, 40, 300, 1 << 20])
def test_lines_keep_their_numbers_in_units(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_module, "BLOCK_BYTES", 32)
    lines = [json.dumps({"text": f"{n} " + "글 " * (n * 7 % 40)}, ensure_ascii=False) for n in range(50)]
    lines[13], lines[29] = "{cut", ""
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines))
    found, dropped = read(open_source("jsonl", tmp_path), size)
    good = [n for n in range(50) if n not in (13, 29)]
    assert joined(found) == {f"a.jsonl:{n + 1}": json.loads(lines[n])["text"] for n in good}
    assert dropped == {"not JSON": 1, "blank line": 1}
    with pytest.raises(DataError, match=r"a\.jsonl, line 14: not JSON"):
        read(open_source("jsonl", tmp_path), size, "stop")


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_compressed_lines_whole_and_broken_off(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    """Two frames, as parallel packers write them; a file cut amid one must not pass for a whole one."""
    halves = ["".join(json.dumps({"text": f"{k} {n}"}) + "\n" for n in range(3000)) for k in range(2)]
    packed = [pack(half.encode()) for half in halves]
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(b"".join(packed))
    found, dropped = read(open_source("jsonl", tmp_path), 100, "stop")
    assert len(found) == 6000 and not dropped and found["a.jsonl" + suffix + ":6000"] == ["1 2999"]
    file.write_bytes(b"".join(packed)[: -len(packed[1]) // 2])
    found, dropped = read(open_source("jsonl", tmp_path), 100)
    assert 3000 <= len(found) < 6000 and dropped.pop("unreadable") == 1 and sum(dropped.values()) <= 1
    with pytest.raises(DataError, match=r"cannot be read|cut off"):
        read(open_source("jsonl", tmp_path), 100, "stop")


def test_records_are_handed_on_whole(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "질문"}], "other": None}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n[1]\n")
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    for name in ("jsonl", "parquet"):
        source = open_source(name, tmp_path, format="messages")
        tally = Tally("skip")
        (document,) = [
            one for unit in source.units(100, SAFE_CUT, tally) for one in source.documents(unit, tally)
        ]
        assert document.record == record and document.num_bytes == (
            len(json.dumps(record)) + 1 if name == "jsonl" else 0
        )
        assert document.where.startswith(str(tmp_path)) and (tally.dropped.get("no record") is None) == (
            name != "jsonl"
        )


def write_rows(path: Path, rows: list[str | None], **options: Any) -> None:
    pq.write_table(
        pa.table({"extra": pa.nulls(len(rows)), "text": pa.array(rows, pa.string())}), path, **options
    )


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_parquet(tmp_path: Path, size: int) -> None:
    rows = [f"{n} 글 {'x' * (n % 9)}" for n in range(40)]
    write_rows(tmp_path / "a.parquet", [*rows, None, " ", ""], row_group_size=6)
    write_rows(tmp_path / "b.parquet", [])
    pq.write_table(pa.table({"txt": ["a", "b"]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-30])
    found, dropped = read(open_source("parquet", tmp_path), size)
    assert joined(found) == {f"a.parquet:{n + 1}": row for n, row in enumerate(rows)}
    assert dropped == {"text field is no string": 1, "blank": 2, "no text field": 2, "unreadable": 1}
    for name, message in (
        ("a", "row 41: field 'text' is NoneType"),
        ("c", "row 1: no field"),
        ("d", "no Parquet file"),
    ):
        with pytest.raises(DataError, match=message):
            read(open_source("parquet", tmp_path / f"{name}.parquet"), size, "stop")


def test_a_row_group_that_cannot_be_read(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "a.parquet", [f"row {n} " * 50 for n in range(20)], row_group_size=10, compression="gzip"
    )
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    at = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(1).data_page_offset
    raw[at : at + 60] = bytes(60)
    (tmp_path / "a.parquet").write_bytes(raw)
    found, dropped = read(open_source("parquet", tmp_path), 1)
    assert len(found) == 10 and dropped == {"unreadable": 1}
    with pytest.raises(DataError, match=r"after row 10: the rest of row groups 1 to 1 cannot be read"):
        read(open_source("parquet", tmp_path), 1, "stop")


@pytest.mark.parametrize("saved", [False, True])
def test_a_dataset_in_a_local_folder(tmp_path: Path, saved: bool) -> None:
    import datasets

    rows: list[str | None] = [f"{n} 글" for n in range(30)]
    made = datasets.Dataset.from_dict({"text": [*rows, None, " "], "n": list(range(32))})
    folder = tmp_path / "set"
    if saved:
        datasets.DatasetDict({"train": made}).save_to_disk(folder)
    else:
        folder.mkdir()
        made.select(range(12)).to_parquet(folder / "train-0.parquet")
        made.select(range(12, 32)).to_parquet(folder / "train-1.parquet")
    found, dropped = read(open_source("hf", folder), 64)
    assert list(joined(found).values()) == rows
    assert dropped == {"text field is no string": 1, "blank": 1}
    source = open_source("hf", folder)
    assert (
        len(source.units(64, SAFE_CUT, Tally())) > 1
        and source.identity() == open_source("hf", folder).identity()
    )
    with pytest.raises(DataError, match=r"row \d+: field 'text' is NoneType"):
        read(open_source("hf", folder), 64, "stop")
    with pytest.raises(DataError, match=r"split.*nothing.*split.*train"):
        read(open_source("hf", folder, split="nothing"), 64)


def test_a_dataset_on_the_hub_is_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_module, "hub_reachable", lambda: False)
    with pytest.raises(DataError, match=r"the hub cannot be reached.*data\.revision"):
        open_source("hf", "someone/some-data")
    pinned = open_source("hf", "someone/some-data", revision="abc").identity()
    assert pinned != open_source("hf", "someone/some-data", revision="abd").identity()
    monkeypatch.setattr(hf_module, "_newest_commit", lambda _: "abc")
    assert open_source("hf", "someone/some-data").identity() == pinned


IDS = [[5, 6, 7], [8], list(range(100, 140)), [9, 9, 9, 9]]


def blocks_to_lists(found: dict[str, list]) -> list[list[int]]:
    return [[int(one) for block in blocks for one in block] for blocks in found.values()]


@pytest.mark.parametrize("size", [1, 30, 1 << 20])
@pytest.mark.parametrize("num_ids", [70_000, 200])
def test_megatron_there_and_back(tmp_path: Path, size: int, num_ids: int) -> None:
    store = store_of_ids(tmp_path / "made", IDS, num_ids)
    prefix = export_megatron(store, tmp_path / "out")
    index = MegatronIndex(Path(f"{prefix}.idx"))
    assert index.dtype == ("<u2" if num_ids == 200 else "<i4") and index.num_documents == 4
    found, dropped = read(open_source("tokens", tmp_path / "out"), size, "stop")
    assert blocks_to_lists(found) == IDS and not dropped


def test_the_index_is_as_megatron_writes_it(tmp_path: Path) -> None:
    """Its bytes, by Megatron's own description; read back with two sequences in one document and int64 ids."""
    prefix = export_megatron(store_of_ids(tmp_path / "made", [[1, 2], [3]], 100), tmp_path / "out")
    expected = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 2, 3)
    expected += struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    assert Path(f"{prefix}.idx").read_bytes() == expected
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)
    head = HEADER.pack(MAGIC, 1, 5, 3, 3)
    rest = struct.pack("<3i", 2, 1, 0) + struct.pack("<3q", 0, 16, 24) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "b.idx").write_bytes(head + rest)
    (tmp_path / "b.bin").write_bytes(struct.pack("<3q", 7, 8, 9))
    found, dropped = read(open_source("tokens", tmp_path / "b.bin"), 100)
    assert blocks_to_lists(found) == [[7, 8, 9]] and dropped == {"blank": 1} and DTYPES[5] == "<i8"
    (tmp_path / "b.bin").write_bytes(struct.pack("<2q", 7, 8))
    assert read(open_source("tokens", tmp_path / "b.bin"), 100)[1]["not whole"] == 1
    (tmp_path / "b.idx").write_bytes(head)
    with pytest.raises(DataError, match=r"b\.bin: cannot be read"):
        read(open_source("tokens", tmp_path / "b.bin"), 100, "stop")


@pytest.mark.parametrize("size", [1, 30, 1 << 20])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bare_ids(tmp_path: Path, size: int, dtype: Any) -> None:
    flat = np.array([one for document in IDS for one in [*document, 1]], dtype)
    flat[:-1].tofile(tmp_path / "a.bin")  # the last end is missing
    (tmp_path / "empty.bin").write_bytes(b"")
    found, _ = read(open_source("tokens", tmp_path, token_dtype=dtype, token_eos=1), size)
    assert blocks_to_lists(found) == [*([*one, 1] for one in IDS[:-1]), IDS[-1]]
    found, _ = read(open_source("tokens", tmp_path, token_dtype=dtype), size)
    assert blocks_to_lists(found) == [flat[:-1].tolist()], "one document without a separator"
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match=f"no multiple of {np.dtype(dtype).itemsize} bytes"):
        read(open_source("tokens", tmp_path, token_dtype=dtype), size, "stop")
