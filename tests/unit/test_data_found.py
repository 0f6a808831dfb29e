"""What stands in a folder is read, or told: links, broken links, files of other kinds, token stores; and names that are not
UTF-8."""

from __future__ import annotations

import bz2
import io
import json
import os
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from stack.config.data_checks import data_faults
from stack.config.schema_data import DataConfig
from stack.data.preview import show_preview
from stack.data.sources import SOURCES, SourceRequest, Tally, all_documents
from stack.errors import DataError
from tests.stores import store_of_ids

Policy = Literal["stop", "skip"]


def read(source: Any, path: Path | str, policy: Policy = "stop") -> tuple[dict[str, str], dict[str, int]]:
    """Place -> text, and reason -> count of what was left out."""
    data, tally = DataConfig(source=source, path=str(path), bad_text=policy), Tally(policy)
    documents = all_documents(SOURCES[data.source](SourceRequest(data, 100, 1)), tally)
    found = {one.place: "".join(map(str, one.blocks())) for one in documents}
    return found, {reason: entry.count for reason, entry in tally.dropped.items()}


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder with links to one outside, to one inside, to itself, to what holds it, and of two in a circle."""
    root, outside = tmp_path / "corpus", tmp_path / "outside"
    (root / "real").mkdir(parents=True)
    (outside / "deep").mkdir(parents=True)
    (root / "real" / "a.txt").write_text("a")
    (outside / "deep" / "b.txt").write_text("b")
    (outside / "back").symlink_to(root)
    (outside / "deep" / "round").symlink_to(outside)
    (root / "in").symlink_to(outside)
    (root / "again").symlink_to(root / "real")
    (root / "self").symlink_to(root)
    (root / "up").symlink_to(tmp_path)
    (root / "c.txt").symlink_to(outside / "deep" / "b.txt")
    return root


READ_ALREADY = "links to a folder that is gone through already, or that holds this one"


@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt", "**/**/*.txt"])
def test_linked_folders_are_read_once(linked: Path, pattern: str) -> None:
    found, dropped = read("text", linked / pattern if pattern else linked)
    assert found == {"c.txt": "b", "in/deep/b.txt": "b", "real/a.txt": "a"}
    assert dropped == {READ_ALREADY: 5}, "again, self, up, in/back, in/deep/round"


def test_a_pattern_of_one_depth_names_the_folders_it_leaves(linked: Path) -> None:
    found, dropped = read("text", linked / "*")
    assert found == {"c.txt": "b"} and dropped == {"folders that the pattern names and does not enter": 5}


def test_hidden_names_and_patterns(tmp_path: Path) -> None:
    for name in ("a/.git/x.txt", "a/.b.txt", "a/c.txt", ".h/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(read("text", tmp_path / "**")[0]) == ["a/c.txt"]
    assert read("text", tmp_path)[1] == {"hidden files and folders": 3}
    assert list(read("text", tmp_path / "**/.git/*.txt")[0]) == ["a/.git/x.txt"]
    assert list(read("text", tmp_path / "*/.b.txt")[0]) == ["a/.b.txt"]


@pytest.mark.parametrize("given", ["", "*.txt", "**/*.txt", "gone.txt"])
def test_a_link_to_nothing_is_a_fault(tmp_path: Path, given: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round.txt").symlink_to(tmp_path / "round.txt")
    with pytest.raises(DataError, match=r"gone\.txt: link to nothing, \d in all.*data\.bad_text=skip"):
        read("text", tmp_path / given)
    found, dropped = read("text", tmp_path / given, "skip")
    assert (found, dropped) == (
        ({}, {"link to nothing": 1}) if given == "gone.txt" else ({"a.txt": "a"}, {"link to nothing": 2})
    )
    assert not list(data_faults(DataConfig(source="text", path=str(tmp_path / given)))), "said by the source"


def test_lines_by_all_their_names_and_the_rest_told(tmp_path: Path) -> None:
    (tmp_path / "a.JSONL").write_bytes(lines("a"))
    (tmp_path / "b.ndjson").write_bytes(lines("b"))
    (tmp_path / "c.jsonl.bz2").write_bytes(bz2.compress(lines("c", "c2")))
    (tmp_path / "d.Jsonl.ZST").write_bytes(zstandard.compress(lines("d")))
    (tmp_path / "e.json").write_bytes(lines("e"))
    (tmp_path / "f.jsonl.xz").write_bytes(b"packed")
    (tmp_path / "g.json").write_bytes(b"[]")
    os.mkfifo(tmp_path / "h.jsonl")
    found, dropped = read("jsonl", tmp_path)
    assert list(found.values()) == ["a", "b", "c", "c2", "d"]
    assert dropped == {
        "files that the source does not read (.json)": 2,
        "files that the source does not read (.xz)": 1,
        "neither file nor folder": 1,
    }
    assert read("jsonl", tmp_path / "e.json")[0] == {"e.json:1": "e"}
    for name in "abcd":
        next(tmp_path.glob(f"{name}.*")).unlink()
    with pytest.raises(
        DataError, match=r"holds no file that ends in \.jsonl.*\(\.json\): 2, first .*use a pattern"
    ):
        read("jsonl", tmp_path)


def test_a_broken_bzip2(tmp_path: Path) -> None:
    packed = bz2.compress(lines(*map(str, range(3000))))
    (tmp_path / "a.jsonl.bz2").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(
        DataError, match=r"a\.jsonl\.bz2, after line \d+: the rest of the file cannot be read"
    ):
        read("jsonl", tmp_path)
    assert read("jsonl", tmp_path, "skip")[1] == {"unreadable": 1}


def test_many_kinds_are_told_in_few_words(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("a"))
    for number in range(50):
        (tmp_path / f"{number}.k{number}").write_text("x")
    dropped = read("jsonl", tmp_path)[1]
    assert len(dropped) == 21 and sum(dropped.values()) == 50
    assert dropped["files that the source does not read (many kinds)"] == 30


@pytest.mark.parametrize("given", ["", "offsets.bin", "*.bin", "**"])
@pytest.mark.parametrize("source", ["tokens", "text"])
def test_a_token_store_is_no_source(tmp_path: Path, source: str, given: str) -> None:
    store_of_ids(tmp_path / "s" / "text-0123456789abcdef", [[1, 2, 3]])
    path = tmp_path / "s" / "text-0123456789abcdef" / given
    with pytest.raises(DataError, match=rf"a token store.*data\.store={tmp_path}/s, .*export=FOLDER"):
        read(source, path)


def test_a_frame_of_zstd_with_too_large_a_window(tmp_path: Path) -> None:
    """A frame by hand: magic, no size, a window of 256 MiB, and one raw block."""
    text = lines("a")
    block = (len(text) << 3 | 1).to_bytes(3, "little") + text
    for window, good in ((17 << 3, True), (18 << 3, False)):
        (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([window]) + block)
        if good:
            assert list(read("jsonl", tmp_path)[0].values()) == ["a"]
        else:
            with pytest.raises(DataError, match=r"a\.jsonl\.zst.*window of over 128 MiB.*zstd --long=27"):
                read("jsonl", tmp_path)
            assert read("jsonl", tmp_path, "skip")[1] == {"unreadable": 1}


NAME = b"bad\xff name"


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_names_that_are_not_utf8(tmp_path: Path, source: str) -> None:
    """Read as any other, and said so that any terminal takes it."""
    contents = {"text": (b"good", b"\xac"), "jsonl": (lines("good"), b"{\n")}
    suffix = {"text": "txt"}.get(source, source)
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + NAME + b"." + suffix.encode()))
    for good in (True, False):
        if source == "parquet":
            made = tmp_path / "made"
            pq.write_table(pa.table({"text" if good else "txt": ["good"]}), made)
            made.rename(path)
        else:
            path.write_bytes(contents[source][not good])
        if good:
            assert list(read(source, tmp_path)[0].values()) == ["good"]
        else:
            with pytest.raises(DataError) as caught:
                read(source, tmp_path)
            assert r"bad\udcff name" in str(caught.value).encode().decode()
            data, tally = DataConfig(source=source, path=str(tmp_path)), Tally("skip")  # pyright: ignore[reportArgumentType]
            assert not list(all_documents(SOURCES[data.source](SourceRequest(data, 100, 1)), tally))
            (entry,) = tally.dropped.values()
            assert r"bad\udcff name" in entry.first.encode().decode()


def test_a_preview_says_such_names(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + NAME)).write_text("some words")
    out = io.StringIO()
    data = DataConfig(source="text", path=str(tmp_path), train_tokenizer=True, vocab_size=300)
    show_preview(data, 1, tokenizer_path=None, model_vocab=None, seed=1, out=out)
    assert r"bad\udcff name: " in out.getvalue().encode().decode()


def test_half_a_pair_in_a_field_name_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"\\ud800": 1}\n')
    with pytest.raises(DataError) as caught:
        read("jsonl", tmp_path)
    assert (
        r"no field 'text' (data.text_field) but an object with \ud800" in str(caught.value).encode().decode()
    )


def test_a_pattern_over_a_large_tree_is_not_gone_through_twice(
    linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the settings only looks at what is in front of `**`: links in a circle would keep it for ever."""
    monkeypatch.setattr(os, "walk", lambda *_, **__: pytest.fail("walked"))
    assert not list(data_faults(DataConfig(source="text", path=str(linked / "**" / "*.nothing"))))
    (fault,) = data_faults(DataConfig(source="text", path=str(linked / "no*" / "**" / "*.txt")))
    assert fault.key == "data.path"
