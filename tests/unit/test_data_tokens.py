"""Files of ids that other tools made: read as they were written, or refused with their name, the cause and a fix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from stack.config.schema_data import DataConfig
from stack.data.megatron import HEADER, MAGIC
from stack.data.sources import SOURCES, SourceRequest, Tally, all_documents
from stack.errors import DataError


def read(
    path: Path, policy: Literal["stop", "skip"] = "skip", **fields: Any
) -> tuple[dict[str, list[int]], dict[str, int], Tally]:
    """Place -> ids, reason -> count of what was left out, and the whole tally."""
    data, tally = DataConfig(source="tokens", path=str(path), bad_text=policy, **fields), Tally(policy)
    documents = all_documents(SOURCES["tokens"](SourceRequest(data, 200_000, 1)), tally)
    found = {one.place: [int(each) for block in one.blocks() for each in block] for one in documents}
    return found, {reason: entry.count for reason, entry in tally.dropped.items()}, tally


def test_ids_of_32_bits_are_not_read_as_16(tmp_path: Path) -> None:
    ids = np.arange(100, 140_000, 1000)
    ids.astype("<u4").tofile(tmp_path / "a.bin")
    assert read(tmp_path)[1] == {"unreadable": 1}
    with pytest.raises(DataError, match=r"a\.bin: .*data\.token_dtype=uint32"):
        read(tmp_path, "stop")
    assert list(read(tmp_path, "stop", token_dtype="uint32")[0]) == ["a.bin:0"]
    np.tile([0, 1, 2, 3], 20).astype("<u2").tofile(tmp_path / "a.bin")
    assert list(read(tmp_path, "stop")[0]) == ["a.bin:0"], "a small vocabulary is none"


@pytest.mark.parametrize(
    ("lengths", "bounds"), [([2, -1], [0, 1, 2]), ([2, 1], [0, 9, 2]), ([2, 1], [0, 1, 3])]
)
def test_an_index_of_megatrons_that_cannot_be(tmp_path: Path, lengths: list[int], bounds: list[int]) -> None:
    write_pair(tmp_path / "a", lengths, bounds)
    assert read(tmp_path)[1] == {"unreadable": 1}


@pytest.mark.parametrize(
    ("bounds", "first", "last"), [([0, 1], 0, 1), ([1, 2], 1, 2), ([0, 3], 0, 3), ([], 0, 0)]
)
def test_an_index_of_megatrons_that_leaves_sequences_out(
    tmp_path: Path, bounds: list[int], first: int, last: int
) -> None:
    write_pair(tmp_path / "a", [2, 1], bounds)
    message = (
        rf"a\.bin: .*document bounds from {first} to {last}, expected from 0 to 2\b.*Fix: make its \.idx anew"
    )
    with pytest.raises(DataError, match=message):
        read(tmp_path, "stop")
    assert read(tmp_path)[:2] == ({}, {"unreadable": 1})


def test_bytes_that_an_index_of_megatrons_does_not_name(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [2, 1], [0, 1, 2], ids=[1, 2, 3, 4, 5])
    with pytest.raises(
        DataError, match=r"a\.bin: it has 10 bytes, and its \.idx names the first 6 .*Fix: make"
    ):
        read(tmp_path, "stop")
    found, dropped, tally = read(tmp_path)
    assert list(found) == ["a.bin:0", "a.bin:1"] and dropped == {"not in the index": 1}
    assert tally.dropped["not in the index"].num_bytes == 4
    write_pair(tmp_path / "a", [], [0], ids=[])
    assert read(tmp_path, "stop")[:2] == ({}, {}), "a pair may be empty"


def write_pair(prefix: Path, lengths: list[int], bounds: list[int], ids: Sequence[int] = (1, 2, 3)) -> None:
    """A pair of Megatron's, of uint16."""
    np.array(ids, "<u2").tofile(prefix.with_suffix(".bin"))
    pointers = [2 * sum(lengths[:n]) for n in range(len(lengths))]
    arrays = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(bounds, "<i8")]
    index = HEADER.pack(MAGIC, 1, 8, len(lengths), len(bounds)) + b"".join(one.tobytes() for one in arrays)
    prefix.with_suffix(".idx").write_bytes(index)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
@pytest.mark.parametrize("most", [16, 300, 150_000])
def test_ids_of_64_bits_are_named(tmp_path: Path, dtype: str, most: int) -> None:
    """Also where all are small, and where most of the file is padding."""
    ids = np.concatenate([np.linspace(0, most, 40), np.zeros(100)]).astype("<i8")
    ids.tofile(tmp_path / "a.bin")
    bits = 8 * np.dtype(dtype).itemsize
    message = (
        rf"a\.bin: .*64 bits, not {bits}\b.*Fix: convert it with numpy\.fromfile\('a\.bin', 'int64'\)"
        r"\.astype\('uint32'\)\.tofile.*data\.token_dtype=uint32"
    )
    with pytest.raises(DataError, match=message):
        read(tmp_path, "stop", token_dtype=dtype)
    assert read(tmp_path, token_dtype=dtype)[1] == {"unreadable": 1}


@pytest.mark.parametrize(
    "ids",
    [
        [17, *[0] * 999],
        [17, 0] * 7,
        [0, 1, 2, 3] * 20,
        [40, 0, 0, 0] * 7 + [0] * 100,
        [*[900, 0] * 50, 17, 17],
        [0] * 200,
    ],
)
def test_padding_and_small_vocabularies_are_no_ids_of_more_bits(tmp_path: Path, ids: list[int]) -> None:
    for dtype in ("uint16", "uint32") if ids[0] != 900 else ("uint32",):
        np.array(ids, dtype).tofile(tmp_path / "a.bin")
        assert list(read(tmp_path, "stop", token_dtype=dtype)[0]) == ["a.bin:0"]


def test_an_array_saved_by_numpy_is_no_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100, dtype="<u2"))
    with pytest.raises(
        DataError, match=r"a\.npy: .*numpy.*Fix: convert it with numpy\.load\('a\.npy'\).*tofile"
    ):
        read(tmp_path / "a.npy", "stop")
    np.load(tmp_path / "a.npy").astype("uint32").tofile(tmp_path / "a-uint32.bin")
    assert list(read(tmp_path / "a-uint32.bin", "stop", token_dtype="uint32")[0])


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_files_of_few_bytes(tmp_path: Path, dtype: str, length: int) -> None:
    (tmp_path / "a.bin").write_bytes(b"\7\0\0"[:length])
    if length == np.dtype(dtype).itemsize:
        assert read(tmp_path, "stop", token_dtype=dtype)[0] == {"a.bin:0": [7]}
    else:
        with pytest.raises(DataError, match=rf"a\.bin: .*its size, {length}, is no multiple of . bytes"):
            read(tmp_path, "stop", token_dtype=dtype)


def test_the_header_of_llm_c_is_no_text(tmp_path: Path) -> None:
    for magic, dtype in ((20240520, "uint16"), (20240801, "uint32")):
        write_llm_c(tmp_path / "a.bin", magic, dtype)
        found, dropped, _ = read(tmp_path, "stop", token_dtype=dtype)
        assert found == {"a.bin:0": [4, 5, 6]} and not dropped
        other = {"uint16": "uint32", "uint32": "uint16"}[dtype]
        message = (
            rf"a\.bin: .*data\.token_dtype={other}, expected {dtype}.*Fix: set data\.token_dtype={dtype}"
        )
        with pytest.raises(DataError, match=message):
            read(tmp_path, "stop", token_dtype=other)


@pytest.mark.parametrize("left", [4, 12, 1000, 1024, 1026])
def test_a_file_of_llm_c_that_breaks_off(tmp_path: Path, left: int) -> None:
    write_llm_c(tmp_path / "a.bin", 20240520, "uint16")
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:left])
    cause = "it breaks off" if left < 1024 else "expected 1,030 for the 3 ids of llm.c's header"
    with pytest.raises(DataError, match=rf"a\.bin: cannot be read \({left:,} bytes.*{cause}"):
        read(tmp_path, "stop")


def write_llm_c(path: Path, magic: int, dtype: str) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, 3
    path.write_bytes(header.tobytes() + np.array([4, 5, 6], dtype).tobytes())
