"""The store: complete or absent, the same after any interruption, one for each setting, with every byte
accounted for."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stack.config.schema_data import DataConfig, MixturePart
from stack.data import build, encode, workers
from stack.data.prepare import (
    ArrayTask,
    ensure_store,
    ensure_stores,
    merge_tasks,
    mixture_parts,
    prepare_task,
)
from stack.data.shards import ShardWriter
from stack.data.store import TokenStore
from stack.data.summary import describe
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
        tokenizer.decode(store.read(a, b).tolist()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)
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
    monkeypatch.setattr("stack.data.chunks.cut_text.__defaults__", (8,))
    pieces = prepare(replace(data, store=f"{data.store}-small"))
    assert contents(pieces.folder) == contents(whole.folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_document_in_several_shards_has_the_ids_of_the_whole(
    data: DataConfig, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one line, between two others."""
    line = " ".join(f"{number} 낱말 漢字， 😀 word{number * number}" for number in range(200))
    (Path(str(data.path)) / "05.txt").write_text(line)
    whole = prepare(data)
    monkeypatch.setattr(build, "LEAST_UNIT", 600)
    monkeypatch.setattr("stack.data.sources.text.BLOCK_BYTES", 100)
    parts = prepare(replace(data, store=f"{data.store}-parts", prepare_workers=workers))
    assert len(parts.info.shards) > 10 and len(whole.info.shards) == 1
    assert parts.info.content == whole.info.content and parts.info.lengths == whole.info.lengths
    assert parts.places.tolist() == whole.places.tolist()


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
    from stack.data import build, prepare, shards

    path, store, moment = sys.argv[1:]
    build.LEAST_UNIT = 600
    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)
    def on_call(number, real):
        calls = iter(range(1, number))
        return lambda *args, **named: real(*args, **named) if next(calls, None) else die()
    if moment == "tokens":
        shards.ShardWriter.append = on_call(30, shards.ShardWriter.append)
    elif moment == "shard":
        os.replace = on_call(9, os.replace)  # plan, three of the first shard, three of the second: amid the third
    elif moment == "index":
        build.join_shards = die
    elif moment == "units":
        build.shutil.rmtree = die
    else:
        build._publish = die
    data = DataConfig(source="text", path=path, store=store, train_tokenizer=True, vocab_size=300)
    prepare.ensure_store(data, tokenizer_path=None, model_vocab=None, seed=1)
"""


@pytest.mark.parametrize("moment", ["tokens", "shard", "index", "units", "rename"])
def test_killed_and_started_again(data: DataConfig, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 between tokens, amid the files of a shard, before the index, behind it, and before the rename: what is
    complete is not made again, the store is that of an unbroken run, and nothing is left beside it."""
    monkeypatch.setattr(build, "LEAST_UNIT", 600)
    command = [sys.executable, "-c", textwrap.dedent(STOP_HERE), str(data.path), data.store, moment]
    stopped = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert stopped.returncode == -9, stopped.stderr
    (left,) = [path for path in Path(data.store).iterdir() if path.is_dir()]
    assert left.suffix == ".partial"
    finished = {path: path.stat().st_mtime_ns for path in left.glob("shards/*.bin")}
    assert len(finished) == {"tokens": 2, "shard": 3}.get(moment, 5)
    folder = prepare(data).folder
    again = {path.name: path.stat().st_mtime_ns for path in folder.glob("shards/*")}
    assert len(again) == 5
    whole = {"shard": 2}.get(moment, len(finished))  # a shard counts when its record is there
    assert sum(again[path.name] == time for path, time in finished.items()) == whole
    assert [path for path in Path(data.store).iterdir() if path.is_dir()] == [folder]
    unbroken = prepare(replace(data, store=f"{data.store}-unbroken"))
    assert contents(unbroken.folder) == contents(folder) and unbroken.folder.name == folder.name


def test_workers_and_machines_make_the_same_store(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LEAST_UNIT", 600)
    alone = prepare(data)
    assert len(alone.info.shards) == 5
    by_workers = prepare(replace(data, store=f"{data.store}-workers", prepare_workers=2))
    assert contents(by_workers.folder) == contents(alone.folder)
    shared = replace(data, store=f"{data.store}-machines")
    settings: dict = {"tokenizer_path": None, "model_vocab": None, "seed": 1, "say": lambda _: None}
    prepare_task(shared, ArrayTask(2, 3), **settings)
    with pytest.raises(DataError, match=r"4 of 5 shards are missing, the first is 0.*0 modulo N"):
        merge_tasks(shared, **settings)
    for index in (0, 1, 1):  # in any order, and once more than needed
        prepare_task(shared, ArrayTask(index, 3), **settings)
    (merged,) = merge_tasks(shared, **settings)
    assert contents(merged) == contents(alone.folder)
    assert merge_tasks(shared, **settings) == [merged]


def test_a_fault_in_a_worker_is_the_users_error(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a worker that is killed; what the others finished stays."""
    monkeypatch.setattr(build, "LEAST_UNIT", 600)
    train_tokenizer([Path(__file__).read_text()], 280).save_pretrained(Path(data.store) / "t")
    (Path(str(data.path)) / "99.txt").write_bytes(b"\xac")
    own: dict = {"tokenizer_path": f"{data.store}/t", "model_vocab": None, "seed": 1, "say": lambda _: None}
    given = replace(data, train_tokenizer=False, prepare_workers=1)
    with pytest.raises(DataError, match=r"99\.txt, line 1, byte 0: 0xAC is not UTF-8"):
        ensure_store(given, **own)
    (partial,) = Path(data.store).glob("*.partial")
    assert len(list(partial.glob("units/*.json"))) == 5, "the plan, and the four units before the bad one"
    monkeypatch.setattr(workers, "_serve", _serve_and_die)
    skipping = replace(given, bad_text="skip")
    with pytest.raises(DataError, match=r"ended with code -9.*lower data\.prepare_workers"):
        ensure_store(skipping, **own)


def _serve_and_die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("asked", "mebibytes", "expected"),
    [(None, 10, 0), (0, 1000, 0), (3, 10, 3), (30, 10, 9), (None, 1000, 2), (None, 0, 2)],
)
def test_number_of_workers(
    asked: int | None, mebibytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert workers.choose_workers(asked, mebibytes << 20, num_units=9) == expected


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

    def publish(partial: Path, folder: Path, real: Callable[[Path, Path], None] = build._publish) -> None:
        hidden.rename(folder)
        real(partial, folder)

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(build, "_publish", publish)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert contents(prepare(data).folder) == expected
    assert [path for path in Path(data.store).iterdir() if path.is_dir()] == [first]


def test_a_full_disk_is_said_and_the_same_command_goes_on(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LEAST_UNIT", 600)
    real, calls = ShardWriter.commit, iter(range(2))

    def full(self: ShardWriter, **fields: object) -> object:
        if next(calls, None) is None:
            raise OSError(28, "No space left on device", str(self.folder / "shards"))
        return real(self, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "commit", full)
        with pytest.raises(
            DataError, match=r"shards: No space left on device.*free some space.*what is complete stays"
        ):
            prepare(data)
    (partial,) = [path for path in Path(data.store).iterdir() if path.is_dir()]
    assert not list(partial.rglob("*.part")), "nothing half-written is left by a process that could clean up"
    said: list[str] = []
    folder = ensure_store(data, tokenizer_path=None, model_vocab=None, seed=1, say=said.append)
    assert any("2 of 5 shards are there already" in line for line in said)
    assert contents(folder) == contents(prepare(replace(data, store=f"{data.store}-unbroken")).folder)


def test_files_that_change_while_they_are_read(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build.make_shards

    def make_and_change(*args: Any) -> None:
        real(*args)
        (Path(str(data.path)) / "03.txt").write_text("changed meanwhile")

    with monkeypatch.context() as patch:
        patch.setattr(build, "make_shards", make_and_change)
        with pytest.raises(DataError, match=r"03\.txt: changed while it was read"):
            prepare(data)
    assert [path for path in Path(data.store).iterdir() if path.is_dir()] == []
    said: list[str] = []
    Path(data.store, "text-other.partial").mkdir()
    ensure_store(data, tokenizer_path=None, model_vocab=None, seed=1, say=said.append)
    assert any("text-other.partial" in line for line in said)


def test_each_part_of_a_mixture_has_a_store(data: DataConfig) -> None:
    tokenizer = prepare(data).trained_tokenizer
    mixture = [
        MixturePart(name="own", weight=3),
        MixturePart(name="drawn", source="random", weight=1),
    ]
    mixed = replace(data, train_tokenizer=False, mixture=mixture)
    assert [part.path for part in mixture_parts(mixed)] == [data.path, None]
    assert mixture_parts(data) == [data]
    settings: dict = {"tokenizer_path": tokenizer, "model_vocab": 300, "seed": 1, "say": lambda _: None}
    first, second = ensure_stores(mixed, **settings)
    assert first.name.startswith("text-") and second.name.startswith("random-")
    other = replace(mixed, mixture=[replace(mixture[0], weight=1)])
    assert ensure_stores(other, **settings) == [first], "a store serves many mixtures"


def test_no_text_at_all(data: DataConfig) -> None:
    with pytest.raises(DataError, match=r"no document with text \(blank: 1"):
        prepare(replace(data, path=str(Path(str(data.path)) / "blank.txt")))


def test_control_tokens_in_the_text_are_said(data: DataConfig) -> None:
    (Path(str(data.path)) / "00.txt").write_text(f"one {END_OF_TEXT} two {END_OF_TEXT}")
    store = prepare(data)
    assert "2 control tokens are spelled out in the text" in describe(store)


def test_a_damaged_plan_is_named_with_the_way_out(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a power loss leaves it: empty."""
    with monkeypatch.context() as patch:
        patch.setattr(build, "join_shards", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(data)
    (plan,) = Path(data.store).glob("*.partial/units/plan.json")
    plan.write_bytes(b"")
    with pytest.raises(DataError, match=r"plan\.json: no whole plan.*delete .*\.partial and start again"):
        prepare(data)


def test_plan_and_trained_tokenizer_reach_the_disk_before_their_names(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(build, "sync", lambda path: synced.append(path.name))
    prepare(data)
    ends = [name for name in synced if name.endswith(".part")]
    assert [name.partition(".")[0] for name in ends] == ["tokenizer", "plan"] and "tokenizer.json" in synced


def test_a_store_whose_info_is_a_list(data: DataConfig) -> None:
    folder = prepare(data).folder
    (folder / "store.json").write_text("[]")
    with pytest.raises(DataError, match="no whole token store"):
        TokenStore(folder)
