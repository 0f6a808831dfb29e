"""A local folder as a dataset of Hugging Face: its splits and subsets are those of `datasets`, its files are read by our own
readers; and folders that `save_to_disk` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stack.config.data_checks import data_faults
from stack.config.schema_data import DataConfig
from stack.data.sources import SOURCES, Source, SourceRequest, Tally, all_documents
from stack.data.sources.hf import HuggingFaceSource
from stack.errors import DataError


def open_source(folder: Path, **changes: Any) -> Source:
    return SOURCES["hf"](SourceRequest(DataConfig(source="hf", path=str(folder), **changes), 100, 1))


def read(folder: Path, **changes: Any) -> tuple[list[str], dict[str, int]]:
    """Texts in order, and reason -> count of what was left out."""
    tally = Tally(changes.get("bad_text", "stop"))
    documents = all_documents(open_source(folder, **changes), tally)
    found = ["".join(map(str, one.blocks())) for one in documents]
    return found, {reason: entry.count for reason, entry in tally.dropped.items()}


def write(path: Path, texts: list[str], extra: Any = None) -> None:
    """One file of records, whose other field is as it comes; the suffix says in which form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"text": text, "extra": extra} for text in texts]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_files_whose_other_fields_differ(tmp_path: Path, suffix: str) -> None:
    """`datasets` casts every column to the type it has in the first file."""
    for number, extra in enumerate([None, "text", 3, {"deep": [1]}]):
        write(tmp_path / f"train-{number}.{suffix}", [f"{number}a", f"{number}b"], extra)
    assert read(tmp_path) == ([f"{n}{x}" for n in range(4) for x in "ab"], {})


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-0", "train-1", "test-0"], {"train": [0, 1], "test": [2]}),
        (["data/train-00000-of-00002", "data/train-00001-of-00002", "data/extra-00000-of-00001"],
         {"train": [0, 1], "extra": [2]}),
        (["train/a", "valid/a", "valid/b"], {"train": [0], "validation": [1, 2]}),
        (["one", "two", "three"], {"train": [0, 2, 1]}),
        (["train/train-train", "train/b", "dev.x"], {"train": [1, 0]}),
    ],
)  # fmt: skip
def test_splits_are_those_of_datasets(tmp_path: Path, names: list[str], splits: dict[str, list[int]]) -> None:
    import datasets

    for number, name in enumerate(names):
        write(tmp_path / f"{name}.parquet", [f"{number}a", f"{number}b"])
    for split, numbers in splits.items():
        found, dropped = read(tmp_path, split=split)
        assert found == [f"{n}{x}" for n in numbers for x in "ab"]
        listed = sum(len(each) for each in splits.values())
        assert sum(dropped.values()) == len(names) - listed, "a file of no split is told"
        theirs = datasets.load_dataset(str(tmp_path), split=split, streaming=True)
        assert sorted({row["text"] for row in theirs}) == sorted(found)
    with pytest.raises(DataError, match=rf"data\.split=nothing: expected one of.*: {', '.join(splits)}\."):
        open_source(tmp_path, split="nothing")


def test_subsets_by_a_readme(tmp_path: Path) -> None:
    for name in ("en/a", "en/b", "ko/a", "loose"):
        write(tmp_path / f"{name}.jsonl", [name])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: english\n  data_files: en/*\n- config_name: korean\n  data_files:\n"
        "  - split: all\n    path: ko/*\n---\nwords\n"
    )
    assert read(tmp_path, subset="english")[0] == ["en/a", "en/b"]
    found, dropped = read(tmp_path, subset="korean", split="all")
    assert found == ["ko/a"] and sum(dropped.values()) == 4, "README.md, two of another subset, one of none"
    names = {json.dumps(open_source(tmp_path, subset=one, split=split).identity())
             for one, split in (("english", "train"), ("korean", "all"))}  # fmt: skip
    assert len(names) == 2
    with pytest.raises(DataError, match=r"subset french: .*french.*english"):
        open_source(tmp_path, subset="french")
    with pytest.raises(DataError, match=r"data\.split=train: expected one of.*: all\."):
        open_source(tmp_path, subset="korean")


def test_a_subset_that_a_folder_does_not_have(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a"])
    with pytest.raises(DataError, match=r"subset english: .*not found"):
        open_source(tmp_path, subset="english")
    (fault,) = data_faults(DataConfig(source="hf", path=str(tmp_path), revision="abc"))
    assert "has no commits" in str(fault)


def test_other_kinds_of_files_are_left_to_datasets(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    assert isinstance(open_source(tmp_path), HuggingFaceSource)
    assert read(tmp_path)[0] == ["one", "two"]
    (tmp_path / "a.csv").unlink()
    (tmp_path / "a.json").write_text('[\n{"text": "three"}\n]')
    assert isinstance(open_source(tmp_path), HuggingFaceSource)
    assert read(tmp_path)[0] == ["three"]


def test_links_in_a_folder_are_followed_or_told(tmp_path: Path) -> None:
    """As a download to the hub's cache looks: files are links. A linked folder is none to `datasets`."""
    write(tmp_path / "blobs" / "b.parquet", ["a"])
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "train-0.parquet").symlink_to(tmp_path / "blobs" / "b.parquet")
    assert read(folder) == (["a"], {})
    (folder / "more").symlink_to(tmp_path / "blobs")
    assert read(folder) == (["a"], {"files that the source does not read (.parquet)": 1})
    (folder / "train-1.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"train-1\.parquet: link to nothing"):
        read(folder)


@pytest.mark.parametrize(
    ("saved_as", "split", "message"),
    [
        (None, "train", None),
        (None, "test", "saved without splits"),
        ("test", "test", None),
        ("test", "train", "all of it is split test: data.split='test'"),
        ("train[:2]", "train", None),
    ],
)
def test_the_split_of_a_saved_dataset(
    tmp_path: Path, saved_as: str | None, split: str, message: str | None
) -> None:
    import datasets

    kind = None if saved_as is None else datasets.NamedSplit(saved_as)
    datasets.Dataset.from_dict({"text": ["a", "b"]}, split=kind).save_to_disk(tmp_path / "s")
    if message is None:
        assert read(tmp_path / "s", split=split)[0] == ["a", "b"]
    else:
        with pytest.raises(DataError, match=message.replace("[", r"\[")):
            read(tmp_path / "s", split=split)
    with pytest.raises(DataError, match="has no subsets"):
        read(tmp_path / "s", split=saved_as or "train", subset="english")


def test_a_folder_with_info_and_parquet_is_none_that_was_saved(tmp_path: Path) -> None:
    """As `download_and_prepare` with Parquet leaves it."""
    write(tmp_path / "set-train-00000-of-00001.parquet", ["a"])
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read(tmp_path) == (["a"], {"files that the source does not read (.json)": 1})
