"""Files of every kind that people have: found in a fixed order, read as they are, and counted when left
out."""

from __future__ import annotations

import bz2
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from stack.config.schema_data import DataConfig
from stack.data.sources import SOURCES, Document, SourceRequest, Tally, all_documents
from stack.data.sources import text as text_module
from stack.errors import ConfigError, DataError
from tests.stores import store_of_ids


def read(
    source: Literal["stdlib", "text", "jsonl", "parquet", "tokens"],
    path: Path | str,
    policy: Literal["stop", "skip"] = "skip",
    **fields: str,
) -> tuple[dict[str, str], dict[str, int], Tally]:
    """Place -> text, reason -> count of what was left out, and the whole tally."""
    data = DataConfig(source=source, path=str(path), bad_text=policy, **fields)  # pyright: ignore[reportArgumentType]
    tally = Tally(policy)
    documents = all_documents(SOURCES[source](SourceRequest(data, 100, 1)), tally)
    found = {document.place: "".join(str(block) for block in document.blocks()) for document in documents}
    return found, {reason: entry.count for reason, entry in tally.dropped.items()}, tally


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Good, blank, empty and bad text, a cut character at the end, a hidden file."""
    root = tmp_path / "corpus"
    (root / "b").mkdir(parents=True)
    contents = {
        "b/last.txt": "끝\r\n".encode(),
        "a.txt": "첫 줄\n둘째 😀\n".encode(),
        "bad.txt": b"one\ntwo\nth\xacree\n",
        "blank.txt": b" \n\t\n",
        "cut.txt": "good \u6f22".encode()[:-1],
        "empty.txt": b"",
        ".hidden": b"\xff",
    }
    for name, content in contents.items():
        (root / name).write_bytes(content)
    return root


def test_text_folder(folder: Path) -> None:
    found, dropped, tally = read("text", folder)
    assert found == {"a.txt": "첫 줄\n둘째 😀\n", "b/last.txt": "끝\r\n"}
    assert list(found) == ["a.txt", "b/last.txt"]
    assert dropped == {"not UTF-8": 2, "blank": 2, "hidden files and folders": 1}
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert tally.dropped["not UTF-8"].num_bytes == sizes["bad.txt"] + sizes["cut.txt"]
    assert tally.dropped["blank"].first == str(folder / "blank.txt")


@pytest.mark.parametrize("block", [1, 2, 3, 5, 1 << 20])
def test_bad_bytes_stop_with_file_line_and_byte(
    folder: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "BLOCK_BYTES", block)
    with pytest.raises(DataError, match=r"bad\.txt, line 3, byte 10: 0xAC is not UTF-8.*data\.bad_text=skip"):
        read("text", folder / "bad.txt", "stop")
    with pytest.raises(DataError, match=r"cut\.txt, line 1, byte 5: 0xE6 is not UTF-8"):
        read("text", folder / "cut.txt", "stop")


@pytest.mark.parametrize("block", [1, 3, 7])
def test_text_is_the_same_in_blocks_of_any_size(
    folder: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "BLOCK_BYTES", block)
    assert read("text", folder / "a.txt")[0] == {"a.txt": "첫 줄\n둘째 😀\n"}


def test_patterns_and_places(folder: Path) -> None:
    assert list(read("text", f"{folder}/**/*.txt")[0]) == ["a.txt", "b/last.txt"]
    assert list(read("text", f"{folder}/b/*")[0]) == ["last.txt"]
    assert list(read("text", folder / "b" / "last.txt")[0]) == ["last.txt"]


def test_an_unreadable_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    assert read("text", folder / "a.txt")[1] == {"unreadable": 1}
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        read("text", folder / "a.txt", "stop")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no such file or folder"),
        ("*.nothing", "the pattern matches no file"),
        ("void", "holds no file"),
    ],
)
def test_nothing_there(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match=message):
        read("jsonl", tmp_path / name)


def test_no_path() -> None:
    with pytest.raises(ConfigError, match=r"data\.path"):
        SOURCES["text"](SourceRequest(DataConfig(source="text"), 100, 1))


GOOD_LINES = [
    b'\xef\xbb\xbf{"text": "first", "extra": null}\n',  # with a byte order mark
    b'{"extra": {"any": ["thing"]}, "text": "\xed\x95\x9c \\ud83d\\ude00"}\r\n',
    b'{"text": "line\\u2028separator", "extra": "now a string"}\n',
]
BAD_LINES = {
    "not UTF-8": b'{"text": "a\xacb"}\n',
    "not JSON": b"{'text': 1}\n",
    "no text field": b'{"txt": "a"}\n',
    "text field is no string": b'{"text": null}\n',
    "not Unicode": b'{"text": "half \\ud83d pair"}\n',
}
DROPPED_LINES = {"blank line": b"  \n", "blank": b'{"text": " \\n"}\n'}


def write_lines(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def test_jsonl(tmp_path: Path) -> None:
    cut = b'{"text": "cut o'
    file = write_lines(tmp_path / "a.jsonl", [*GOOD_LINES, *BAD_LINES.values(), *DROPPED_LINES.values(), cut])
    found, dropped, tally = read("jsonl", file)
    assert found == {"a.jsonl:1": "first", "a.jsonl:2": "한 😀", "a.jsonl:3": "line\u2028separator"}
    assert dropped == {**dict.fromkeys(BAD_LINES, 1), **dict.fromkeys(DROPPED_LINES, 1), "not JSON": 2}
    left_out = sum(entry.num_bytes for entry in tally.dropped.values())
    assert left_out + sum(map(len, GOOD_LINES)) == file.stat().st_size


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_stops_with_its_number(tmp_path: Path, reason: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", [*GOOD_LINES, BAD_LINES[reason]])
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: .*data\.bad_text=skip"):
        read("jsonl", file, "stop")


def test_an_integer_too_long_for_python(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [*GOOD_LINES, b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n"])
    assert read("jsonl", file)[1] == {"not JSON": 1}


def test_a_cut_last_line_is_named_as_such(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [*GOOD_LINES, b'{"text": "cut o'])
    with pytest.raises(DataError, match=r"line 4: not JSON .*the file may be cut off"):
        read("jsonl", file, "stop")
    whole = write_lines(tmp_path / "b.jsonl", [b'{"text": "no line feed at the end"}'])
    assert list(read("jsonl", whole, "stop")[0].values()) == ["no line feed at the end"]


def test_null_in_one_file_and_a_string_in_the_next(tmp_path: Path) -> None:
    """The other columns are not looked at, so their types need not agree."""
    for name, extra in (("a", None), ("b", "text"), ("c", 3)):
        write_lines(tmp_path / f"{name}.jsonl", [json.dumps({"extra": extra, "body": name}).encode() + b"\n"])
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "notes.md").write_text("not a line of JSON")
    found, dropped, _ = read("jsonl", tmp_path, "stop", text_field="body")
    assert list(found.values()) == ["a", "b", "c"]
    assert dropped == {"files that the source does not read (.md)": 1}


def test_gzip_and_a_broken_gzip(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": os.urandom(40).hex()}).encode() + b"\n" for _ in range(300))
    packed = gzip.compress(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    assert len(read("jsonl", tmp_path)[0]) == 300
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    found, dropped, _ = read("jsonl", tmp_path)
    assert 0 < len(found) < 300 and dropped == {"unreadable": 1}
    with pytest.raises(DataError, match=r"after line \d+: the rest of the file cannot be read"):
        read("jsonl", tmp_path, "stop")


@pytest.mark.parametrize(("name", "source_lines"), [("a.jsonl", 3), ("a.json", 3), ("a.jsonl", 4000)])
@pytest.mark.parametrize(
    ("pack", "kind", "ending"),
    [(gzip.compress, "gzip", ".gz"), (zstandard.compress, "zstd", ".zst"), (bz2.compress, "bzip2", ".bz2")],
)
@pytest.mark.parametrize("size", [10, 1 << 62])
def test_packed_lines_under_the_name_of_plain_ones(
    tmp_path: Path,
    name: str,
    source_lines: int,
    pack: Callable[[bytes], bytes],
    kind: str,
    ending: str,
    size: int,
) -> None:
    path, lines = (
        tmp_path / name,
        [json.dumps({"text": str(n)}).encode() + b"\n" for n in range(source_lines)],
    )
    path.write_bytes(pack(b"".join(lines)))
    source = SOURCES["jsonl"](SourceRequest(DataConfig(source="jsonl", path=str(path)), 100, 1))

    def documents(tally: Tally) -> list[Document]:
        return [one for unit in source.units(size, None, tally) for one in source.documents(unit, tally)]

    message = rf"{name}: it is compressed with {kind}.*Fix: rename it to {name}{ending}"
    with pytest.raises(DataError, match=message):
        documents(Tally("stop"))
    tally = Tally("skip")
    assert not documents(tally)
    assert tally.dropped["unreadable"].num_bytes == path.stat().st_size and len(tally.dropped) == 1


def test_standard_library_is_real_text() -> None:
    found, dropped, _ = read("stdlib", "unused", "stop")
    assert len(found) > 300 and sum(map(len, found.values())) > 4_000_000
    assert "def dataclass" in found["dataclasses.py"]
    assert list(found) == sorted(found, key=os.fsencode)
    assert not [place for place in found if "site-packages" in place or "/test/" in f"/{place}"]
    assert set(dropped) <= {"blank", "not UTF-8"}


def test_what_preparation_and_runs_write_is_no_source(tmp_path: Path) -> None:
    """A store beside the user's files, one in the making, its lock and a run's folder change nothing."""
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "deep" / "a.txt").write_text("mine")
    (tmp_path / "mine" / "yarn.lock").write_text("mine too")
    store_of_ids(tmp_path / "text-0123456789abcdef", [[1, 2, 3]])
    (tmp_path / "text-fedcba9876543210.partial" / "units").mkdir(parents=True)
    (tmp_path / "text-fedcba9876543210.partial" / "units" / "plan.json").write_text("{}")
    (tmp_path / "text-0123456789abcdef.lock").touch()
    (tmp_path / "out" / "run").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "lock"):
        (tmp_path / "out" / "run" / name).write_text("{}")
    for path in (tmp_path, f"{tmp_path}/**/*"):
        assert list(read("text", path, "stop")[0]) == ["mine/deep/a.txt", "mine/yarn.lock"]


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "a.txt").write_text("open")
    scan = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"shut: the folder cannot be read \(Permission denied\)"):
        read("text", tmp_path)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_bad_byte_in_parquet_is_a_fault_of_its_row(tmp_path: Path, policy: Literal["stop", "skip"]) -> None:
    raw = pa.array([b"one", b"t\xacwo", b"three"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    if policy == "stop":
        with pytest.raises(DataError, match=r"a\.parquet, row 2: 0xAC is not UTF-8"):
            read("parquet", tmp_path, policy)
    else:
        found, dropped, _ = read("parquet", tmp_path, policy)
        assert found == {"a.parquet:1": "one", "a.parquet:3": "three"} and dropped == {"not UTF-8": 1}
