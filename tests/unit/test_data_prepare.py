"""The store: complete or absent, the same after any interruption, one for each setting, with every byte
accounted for."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stack.config.schema_data import DataConfig
from stack.data import encode
from stack.data import prepare as prepare_module
from stack.data.prepare import describe, ensure_store
from stack.data.store import INFO, StoreWriter, TokenStore
from stack.data.tokenizer import END_OF_TEXT, TextEncoder, load_tokenizer, train_tokenizer
from stack.errors import ConfigError, DataError
from tests.stores import prepare

REPO = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Twenty files of text and a blank one."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(
            f"Document {number} 문서\n" + f"some words {number} " * (number + 1)
        )
    (folder / "blank.txt").write_text("  ")
    return DataConfig(
        source="text",
        path=str(folder),
        store=str(tmp_path / "store"),
        train_tokenizer=True,
        vocab_size=300,
        seq_len=16,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_documents_come_back_and_every_byte_is_counted(data: DataConfig) -> None:
    store = prepare(data)
    files = sorted(Path(str(data.path)).glob("[0-9]*.txt"))
    tokenizer = load_tokenizer(str(store.tokenizer))
    bounds = store.offsets.tolist()
    texts = [
        tokenizer.decode(store.tokens[a:b].tolist()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    assert texts == [file.read_text() + END_OF_TEXT for file in files]
    dropped = sum(entry["num_bytes"] for entry in store.info.dropped.values())
    assert store.info.text_bytes == sum(file.stat().st_size for file in files)
    assert store.info.text_bytes + dropped == sum(
        path.stat().st_size for path in Path(str(data.path)).iterdir()
    )
    shown = describe(store)
    assert "20 documents" in shown and f"{store.info.num_tokens:,} tokens" in shown
    assert "left out, blank: 1 (2 bytes)" in shown and "bytes a token" in shown


def test_long_documents_go_in_chunks_with_the_same_ids(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole document at once, and in chunks of a few characters and small batches."""
    whole = prepare(data)
    monkeypatch.setattr(encode, "BATCH_CHARS", 50)
    monkeypatch.setattr("stack.data.chunks.CHUNK_CHARS", 8)
    monkeypatch.setattr("stack.data.chunks.cut_text.__defaults__", (8,))
    pieces = prepare(replace(data, store=f"{data.store}-small"))
    assert contents(pieces.folder) == contents(whole.folder)


def test_without_end_of_text(data: DataConfig) -> None:
    with_end, without = prepare(data), prepare(replace(data, append_eos=False))
    assert with_end.info.num_tokens == without.info.num_tokens + 20
    assert with_end.folder != without.folder and without.info.eos_id is None


def test_each_setting_has_a_store_of_its_own(data: DataConfig) -> None:
    folder = Path(str(data.path))
    variants: list[Callable[[], DataConfig]] = [
        lambda: data,
        lambda: replace(data, vocab_size=310),
        lambda: replace(data, append_eos=False),
        lambda: replace(data, bad_text="skip"),
        lambda: replace(data, path=str(folder / "0*.txt")),
        lambda: replace(data, source="random", path=None, random_tokens=100),
        lambda: replace(data, source="random", path=None, random_tokens=101),
    ]
    folders = [prepare(make()).folder for make in variants]
    assert len(set(folders)) == len(variants)
    same = [replace(data, seq_len=8), replace(data, eval_fraction=0.5), replace(data, packing="document")]
    assert {prepare(one).folder for one in same} == {folders[0]}, "these are decided when rows are cut"
    (folder / "00.txt").write_text("another text of another length")
    assert prepare(data).folder not in folders, "a changed file makes a new store"


def test_the_models_tokenizer(data: DataConfig, tmp_path: Path) -> None:
    for name, vocab_size in (("a", 280), ("b", 290)):
        train_tokenizer([Path(__file__).read_text()], vocab_size).save_pretrained(tmp_path / name)
    own = replace(data, train_tokenizer=False)
    first, second = (
        ensure_store(own, tokenizer_path=str(tmp_path / name), model_vocab=512, seed=1, say=lambda _: None)
        for name in "ab"
    )
    assert first != second
    assert TokenStore(first).tokenizer == str(tmp_path / "a")
    num_ids = TextEncoder(load_tokenizer(str(tmp_path / "a"))).num_ids
    with pytest.raises(ConfigError, match=f"at most {num_ids - 1} ids"):
        ensure_store(own, tokenizer_path=str(tmp_path / "a"), model_vocab=num_ids - 1, seed=1)
    with pytest.raises(ConfigError, match=r"model\.tokenizer=None: expected a tokenizer"):
        ensure_store(own, tokenizer_path=None, model_vocab=512, seed=1)
    with pytest.raises(ConfigError, match=r"data\.vocab_size=300: expected at most 299"):
        ensure_store(data, tokenizer_path=None, model_vocab=299, seed=1)


STOP_HERE = """
    import os, signal, sys
    from stack.config.schema_data import DataConfig
    from stack.data import prepare
    from stack.data.store import StoreWriter

    path, store, moment = sys.argv[1:]
    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)
    count = 0
    def append(self, ids, real=StoreWriter.append):
        global count
        count += 1
        die() if count == 15 else real(self, ids)
    if moment == "tokens":
        StoreWriter.append = append
    elif moment == "index":
        StoreWriter.finish = die
    else:
        prepare._publish = die
    data = DataConfig(source="text", path=path, store=store, train_tokenizer=True, vocab_size=300)
    prepare.ensure_store(data, tokenizer_path=None, model_vocab=None, seed=1)
"""


@pytest.mark.parametrize("moment", ["tokens", "index", "rename"])
def test_killed_and_started_again(data: DataConfig, moment: str) -> None:
    """kill -9 between tokens, before the index and before the rename: then the same store as without it, and
    no rest."""
    command = [sys.executable, "-c", textwrap.dedent(STOP_HERE), str(data.path), data.store, moment]
    stopped = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert stopped.returncode == -9, stopped.stderr
    left = [path.name for path in Path(data.store).iterdir() if path.is_dir()]
    assert len(left) == 1 and ".partial-" in left[0]
    said: list[str] = []
    folder = ensure_store(data, tokenizer_path=None, model_vocab=None, seed=1, say=said.append)
    assert any("left by a process that was stopped" in line for line in said)
    assert [path for path in Path(data.store).iterdir() if path.is_dir()] == [folder]
    unbroken = prepare(replace(data, store=f"{data.store}-unbroken"))
    assert contents(unbroken.folder) == contents(folder) and unbroken.folder.name == folder.name


def test_a_second_process_waits_and_takes_the_firsts_work(data: DataConfig) -> None:
    """flock is held by an open file, so another thread with its own file stands for another process."""
    folder = prepare(data).folder
    real = folder.rename(folder.with_name("finished-by-the-first"))
    said: list[str] = []
    waiting = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if "waiting for another process" in line:
            waiting.set()

    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        settings = {"tokenizer_path": None, "model_vocab": None, "seed": 1, "say": say}
        second = threading.Thread(target=ensure_store, args=(data,), kwargs=settings)
        second.start()
        assert waiting.wait(timeout=60)
        real.rename(folder)
    second.join(timeout=60)
    assert not second.is_alive()
    assert len(said) == 2 and "20 documents" in said[1], "nothing was built a second time"


def test_a_store_that_another_process_published_meanwhile(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without locks both build; the later one takes the earlier one's and leaves nothing
    behind."""
    first = prepare(data).folder
    expected = contents(first)
    hidden = first.rename(first.with_name("hidden"))

    def publish(
        partial: Path, folder: Path, real: Callable[[Path, Path], None] = prepare_module._publish
    ) -> None:
        hidden.rename(folder)
        real(partial, folder)

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(prepare_module, "_publish", publish)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert contents(prepare(data).folder) == expected
    assert [path for path in Path(data.store).iterdir() if path.is_dir()] == [first]


def test_failures_leave_nothing(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(str(data.path)) / "99.txt").write_bytes(b"\xac")
    with pytest.raises(DataError, match="not UTF-8"):
        prepare(data)

    def full(self: StoreWriter, ids: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "append", full)
        with pytest.raises(DataError, match=r"No space left on device.*free some space"):
            prepare(replace(data, bad_text="skip"))
    assert [path for path in Path(data.store).iterdir() if path.is_dir()] == []
    assert prepare(replace(data, bad_text="skip")).info.dropped["not UTF-8"]["count"] == 1


def test_no_text_at_all(data: DataConfig) -> None:
    with pytest.raises(DataError, match=r"no document with text \(blank: 1"):
        prepare(replace(data, path=str(Path(str(data.path)) / "blank.txt")))


def test_a_damaged_store_is_named(data: DataConfig) -> None:
    store = prepare(data)
    (store.folder / "tokens.bin").write_bytes(b"\0" * 10)
    with pytest.raises(DataError, match=r"tokens\.bin has 10 bytes.*delete the folder"):
        TokenStore(store.folder)
    (store.folder / INFO).unlink()
    with pytest.raises(DataError, match="no whole token store"):
        TokenStore(store.folder)


def test_control_tokens_in_the_text_are_said(data: DataConfig) -> None:
    (Path(str(data.path)) / "00.txt").write_text(f"one {END_OF_TEXT} two {END_OF_TEXT}")
    store = prepare(data)
    assert "2 control tokens are spelled out in the text" in describe(store)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, num_ids=10)
    writer.append(np.array([0, 9]))
    for bad in ([10], [-1]):
        with pytest.raises(DataError, match="expected 0 to 9"):
            writer.append(np.array(bad))
    writer.close()
