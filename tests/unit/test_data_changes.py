"""Files that change, vanish or cannot be cut while a store is made: refused or counted, and never a store of two states."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from stack.config.schema_data import DataConfig
from stack.data import build, chunks, encode
from stack.data import prepare as prepare_module
from stack.data.megatron import export_megatron
from stack.data.prepare import ArrayTask, ensure_store, merge_tasks, prepare_task
from stack.data.sources import jsonl as jsonl_module
from stack.data.sources import text as text_module
from stack.data.store import TokenStore
from stack.data.tokenizer import train_tokenizer
from stack.errors import DataError
from tests.stores import prepare, store_of_ids

WORDS = [f"word{number} " * (number + 5) for number in range(60)]
SETTINGS: dict[str, Any] = {"tokenizer_path": None, "model_vocab": None, "seed": 1, "say": lambda _: None}


def settings_with(**changes: Any) -> dict[str, Any]:
    return SETTINGS | changes


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LEAST_UNIT", 2000)
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 256)
    monkeypatch.setattr(jsonl_module, "BLOCK_BYTES", 256)


@pytest.fixture(params=["text", "jsonl"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    """One file, large enough for several units."""
    file = tmp_path / f"a.{request.param}"
    if request.param == "text":
        file.write_text("".join(WORDS))
    else:
        file.write_text("".join(json.dumps({"text": words}) + "\n" for words in WORDS))
    return DataConfig(
        source=request.param,
        path=str(file),
        store=str(tmp_path / "store"),
        train_tokenizer=True,
        vocab_size=300,
        prepare_workers=0,
    )


def append(data: DataConfig) -> None:
    with Path(str(data.path)).open("a") as file:
        file.write('{"text": "one more"}\n')


def restore(data: DataConfig) -> Callable[[], None]:
    """Puts the file back as it is now, with its time."""
    path = Path(str(data.path))
    content, status = path.read_bytes(), path.stat()

    def put_back() -> None:
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return put_back


def folders(data: DataConfig) -> list[str]:
    return sorted(path.suffix for path in Path(data.store).iterdir() if path.is_dir())


def test_a_file_that_grows_before_it_is_named(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the search for files and their hash, the tokenizer is loaded, which takes seconds."""
    real = prepare_module._load_encoder

    def load(*args: Any) -> Any:
        append(data)
        return real(*args)

    monkeypatch.setattr(prepare_module, "_load_encoder", load)
    with pytest.raises(DataError, match=r"a\.\w+: changed while it was read \([\d,]+ bytes, [\d,]+ before\)"):
        prepare(data)
    assert ".partial" in folders(data) and "" not in folders(data)


@pytest.mark.parametrize("way", ["alone", "machines"])
def test_a_file_that_changes_and_changes_back(
    data: DataConfig, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is as before at the end, in size and time, but a shard was made of something else."""
    unbroken = prepare(replace(data, store=f"{data.store}-unbroken"))
    put_back = restore(data)
    real = encode.ShardMaker.make

    def make(self: Any, number: int, *args: Any) -> Any:
        if number == 2:
            path = Path(str(data.path))
            path.write_bytes(path.read_bytes().replace(b"word2", b"wurd2").replace(b"word3", b"wurd3"))
        try:
            return real(self, number, *args)
        finally:
            if number == 2:
                put_back()

    order = (
        partial(prepare, data) if way == "alone" else partial(prepare_task, data, ArrayTask(0, 1), **SETTINGS)
    )
    with monkeypatch.context() as patch:
        patch.setattr(encode.ShardMaker, "make", make)
        with pytest.raises(DataError, match="changed while it was read"):
            order()
    if way == "alone":
        again = prepare(data)
    else:
        with pytest.raises(DataError, match=r"shards are missing, the first is 2"):
            merge_tasks(data, **SETTINGS)
        prepare_task(data, ArrayTask(0, 1), **SETTINGS)
        again = TokenStore(merge_tasks(data, **SETTINGS)[0])
    assert again.info == unbroken.info


def test_a_file_that_changes_while_its_units_are_made(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan stays where the making stops: it must not hold places of another state."""
    unbroken = prepare(replace(data, store=f"{data.store}-unbroken"))
    put_back = restore(data)
    find_plan = build.Building._find_plan

    def change(self: Any, cut: Any) -> None:
        path = Path(str(data.path))
        path.write_bytes(b" " * 100 + path.read_bytes())
        try:
            find_plan(self, cut)
        finally:
            put_back()

    with monkeypatch.context() as patch:
        patch.setattr(build.Building, "_find_plan", change)
        with pytest.raises(DataError, match="changed while it was read"):
            prepare(data)
    assert prepare(data).info == unbroken.info


def test_a_file_that_is_deleted(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of free space or permissions."""
    real = build.make_shards

    def delete(*args: Any) -> None:
        Path(str(data.path)).unlink()
        real(*args)

    monkeypatch.setattr(build, "make_shards", delete)
    with pytest.raises(DataError, match=r"a\.\w+.*No such file") as caught:
        prepare(data)
    assert "free some space" not in str(caught.value)
    with pytest.raises(DataError, match="no such file or folder"):
        prepare(data)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_file_that_is_deleted_after_its_shards(
    data: DataConfig, policy: Literal["stop", "skip"], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build.make_shards

    def delete(*args: Any) -> None:
        real(*args)
        Path(str(data.path)).unlink()

    monkeypatch.setattr(build, "make_shards", delete)
    with pytest.raises(DataError, match=r"changed while it was read \(No such file"):
        prepare(replace(data, bad_text=policy))
    assert folders(data) == []


@pytest.mark.parametrize("source", ["text", "jsonl"])
@pytest.mark.parametrize("size", [1200, 9000])
@pytest.mark.parametrize("cuttable", [True, False])
def test_a_document_that_cannot_be_cut_is_left_out_and_counted(
    tmp_path: Path, source: str, size: int, cuttable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one, and one that goes to several units; and any long one, where the tokenizer knows no place to cut."""
    monkeypatch.setattr(chunks, "MOST_CHARS", 1000)
    monkeypatch.setattr(chunks, "STRETCH_CHARS", 100)
    (tmp_path / "files").mkdir()
    texts = [words[:400] for words in WORDS]
    files = tmp_path / "files"

    def write(number: int, text: str) -> None:
        content = text if source == "text" else json.dumps({"text": text}) + "\n"
        (files / f"{number:02}.{source}").write_text(content)

    for number, text in enumerate(texts):
        write(number, text)
    train_tokenizer(texts, 300).save_pretrained(tmp_path / "tokenizer")
    if not cuttable:
        monkeypatch.setattr("stack.data.tokenizer.safe_cut", lambda _: None)
    data = DataConfig(source=source, path=str(files), store=str(tmp_path / "s"), bad_text="skip")  # pyright: ignore[reportArgumentType]
    settings = settings_with(tokenizer_path=str(tmp_path / "tokenizer"))
    without = TokenStore(ensure_store(data, **settings))
    long = "ACGT" * (size // 4) if cuttable else "short words " * (size // 12)
    write(77, f"some words {long} and an end")
    store = TokenStore(ensure_store(data, **settings))
    assert store.info.content == without.info.content
    entry = store.info.dropped["no place to cut"]
    assert entry["count"] == 1 and f"77.{source}" in entry["first"] and entry["num_bytes"] >= size
    with pytest.raises(
        DataError, match=rf"77\.{source}.*more than 1,000 characters without.*data\.bad_text=skip"
    ):
        ensure_store(replace(data, bad_text="stop"), **settings)


def test_a_tokenizer_is_trained_without_what_cannot_be_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MOST_CHARS", 1000)
    monkeypatch.setattr(chunks, "STRETCH_CHARS", 100)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": one}) + "\n" for one in ["A" * 2000, *WORDS])
    )
    data = DataConfig(
        source="jsonl", path=str(tmp_path / "a.jsonl"), store=str(tmp_path / "s"), bad_text="skip",
        train_tokenizer=True, vocab_size=300,
    )  # fmt: skip
    store = prepare(data)
    assert store.num_documents == len(WORDS) and store.info.dropped["no place to cut"]["count"] == 1


@pytest.mark.parametrize("indexed", [True, False])
def test_ids_that_the_model_does_not_know(tmp_path: Path, indexed: bool) -> None:
    """Said with the file, or left out as one document."""
    ids = [[1, 2, 0], [3, 500, 0], [4, 5, 0]]
    if indexed:
        (tmp_path / "a").mkdir()
        export_megatron(store_of_ids(tmp_path / "made", ids), tmp_path / "a")
    else:
        (tmp_path / "a").mkdir()
        np.concatenate(ids).astype("<u2").tofile(tmp_path / "a" / "made.bin")
    data = DataConfig(source="tokens", path=str(tmp_path / "a"), store=str(tmp_path / "s"), token_eos=0)
    settings = settings_with(model_vocab=100)
    with pytest.raises(
        DataError, match=r"made\.bin, (document 1|tokens 3 to 5): ids from 0 to 500, expected 0 to 99"
    ):
        ensure_store(data, **settings)
    store = TokenStore(ensure_store(replace(data, bad_text="skip"), **settings))
    assert store.read(0, store.num_tokens).tolist() == [1, 2, 0, 4, 5, 0]
    assert store.info.dropped["ids that the model does not know"]["count"] == 1


def test_unfinished_stores_are_told_in_one_short_line(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / "s" / f"text-{number:016}.partial").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("some words")
    data = DataConfig(
        source="text", path=str(tmp_path / "a.txt"), store=str(tmp_path / "s"), train_tokenizer=True,
        vocab_size=300,
    )  # fmt: skip
    said: list[str] = []
    ensure_store(data, **settings_with(say=said.append))
    (line,) = [line for line in said if "unfinished stores" in line]
    assert "2,000 unfinished stores" in line and "and 1,995 more" in line and len(line) < 600


def test_a_file_of_ids_that_is_deleted_is_a_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.arange(1, 50, dtype="<u2").tofile(tmp_path / "a.bin")
    data = DataConfig(source="tokens", path=str(tmp_path / "a.bin"), store=str(tmp_path / "s"))
    real = build.make_shards

    def delete(*args: Any) -> None:
        (tmp_path / "a.bin").unlink()
        real(*args)

    monkeypatch.setattr(build, "make_shards", delete)
    with pytest.raises(DataError, match=r"a\.bin: cannot be read .*No such file") as caught:
        ensure_store(data, **settings_with(model_vocab=100))
    assert "free some space" not in str(caught.value)
