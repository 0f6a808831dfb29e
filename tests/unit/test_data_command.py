"""`launch/prepare.py`: its own arguments beside the settings, and the work of several machines joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from stack.config.compose import compose_config
from stack.data import build
from stack.data import command as command_module
from stack.data.command import LENGTHS, Command, prepare, take_command
from stack.data.megatron import MegatronIndex
from stack.data.prepare import ArrayTask
from stack.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("arguments", "expected", "rest"),
    [
        (["+exp=quickstart", "data.store=x"], Command(), ["+exp=quickstart", "data.store=x"]),
        (["shard=2/5", "seed=3"], Command(task=ArrayTask(2, 5)), ["seed=3"]),
        (["merge=true", "export=out"], Command(merge=True, export=Path("out")), []),
        (["merge=false", "data.split=merge"], Command(), ["data.split=merge"]),
        (["preview=2"], Command(preview=2), []),
    ],
)
def test_own_arguments(arguments: list[str], expected: Command, rest: list[str]) -> None:
    assert take_command(arguments) == (expected, rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shard=5/5"], r"shard='5/5': expected i/N.*from 0 to N - 1"),
        (["shard=one"], "i/N"),
        (["merge=yes"], "true or false"),
        (["shard=0/2", "merge=true"], "when all machines are done"),
        (["shard=0/2", "export=x"], "when all machines are done"),
        (["preview=1", "shard=0/2"], "no shard beside it"),
        (["preview=1", "merge=true", "export=x"], "no export or merge beside it"),
        (["export="], "a folder to write to.*export=FOLDER"),
    ],
)
def test_arguments_that_cannot_be(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take_command(arguments)


def test_two_machines_a_merge_and_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LEAST_UNIT", 400)
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number} " * 20)
    common = [
        "parallel.sp=1",
        "data=text",
        "data.train_tokenizer=true",
        "data.vocab_size=300",
        "schedule.steps=1",
    ]
    common.append(f"data.path={tmp_path}/text")

    def run(store: str, *own: str) -> list[Path]:
        command, rest = take_command([*common, f"data.store={tmp_path / store}", *own])
        return [share.store.folder for share in prepare(compose_config(rest), command)]

    (alone,) = run("alone")
    assert run("shared", "shard=1/2") == []
    with pytest.raises(DataError, match="shards are missing"):
        run("shared", "merge=true")
    assert run("shared", "shard=0/2") == []
    (merged,) = run("shared", "merge=true", f"export={tmp_path / 'megatron'}")
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (alone, merged)
    ]
    assert contents[0] == contents[1] and Path(LENGTHS) in contents[0] and merged.name == alone.name
    index = MegatronIndex(tmp_path / "megatron" / f"{alone.name}.idx")
    assert index.num_documents == 12


def test_a_store_without_room_for_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a folder that may only be read: the tokens serve without it."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(command_module, "draw_lengths", refuse)
    settings = [
        "parallel.sp=1",
        "data=random",
        "data.random_tokens=1000",
        f"data.store={tmp_path}",
        "schedule.steps=1",
    ]
    (share,) = prepare(compose_config(settings), Command())
    assert share.store.num_tokens == 1000
    assert "no picture of their lengths" in capsys.readouterr().out
