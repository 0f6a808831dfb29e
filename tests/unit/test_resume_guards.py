"""What a resume refuses or tells, one piece at a time, and left-overs that are links or cannot be removed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import stack.checkpoint.publish as publish_module
import stack.train.resume as resume_module
from stack.checkpoint.differences import differences
from stack.checkpoint.find import Checkpoint
from stack.checkpoint.manifest import Manifest, step_folder_name
from stack.checkpoint.state import TrainState
from stack.errors import CheckpointError
from stack.train.folder import RunFolder
from stack.train.resume import check_tokenizer
from tests.unit.saving_rig import make_saver, names, save_steps
from tests.unit.train_fakes import FakeEngine, one_rank


def checkpoint_of(run: Path) -> Checkpoint:
    return Checkpoint(run / "checkpoints" / step_folder_name(2), Manifest(2, {}, 4, {}, {}))


@pytest.mark.parametrize(
    ("saved", "now", "force", "refused"),
    [
        ("a" * 64, "b" * 64, [], True),
        ("a" * 64, "b" * 64, ["data.path"], True),
        ("a" * 64, "b" * 64, ["data"], True),
        ("a" * 64, "b" * 64, ["data.train_tokenizer"], False),
        ("a" * 64, "b" * 64, ["model.tokenizer"], False),
        ("a" * 64, "a" * 64, [], False),
        (None, "b" * 64, [], False),
        ("a" * 64, None, [], False),
    ],
)
def test_another_tokenizer_needs_a_name_of_its_own(
    saved: str | None, now: str | None, force: list[str], refused: bool, tmp_path: Path
) -> None:
    if not refused:
        check_tokenizer(checkpoint_of(tmp_path), saved, now, force)
        return
    with pytest.raises(CheckpointError, match=f"model.tokenizer={tmp_path}/hf_files") as caught:
        check_tokenizer(checkpoint_of(tmp_path), saved, now, force)
    assert f"checkpoint.force=[{','.join([*force, 'model.tokenizer'])}]" in str(caught.value)


def test_a_folder_is_the_same_however_it_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def differ(saved: str | None, now: str | None) -> bool:
        return bool(differences({"data": {"path": saved}}, {"data": {"path": now}}))

    for now in (str(tmp_path / "texts"), "./texts", "~/texts"):
        assert not differ("texts", now)
    assert differ("texts", "others") and differ("texts", None) and not differ(None, None)


def test_newer_checkpoints_that_cannot_be_set_aside_are_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(resume_module, "set_aside_newer", refuse)
    with pytest.raises(CheckpointError, match=r"could not be renamed.*Permission denied.*be writable"):
        resume_module._set_aside(RunFolder(tmp_path), checkpoint_of(tmp_path))


def test_checkpoints_that_were_moved_behind_links_are_replaced_and_deleted_as_links(tmp_path: Path) -> None:
    told: list[str] = []
    folder, other = tmp_path / "own", tmp_path / "other disk"
    other.mkdir()
    save_steps(folder, 2, 4)
    for name in names(folder):
        shutil.move(folder / name, other / name)
        (folder / name).symlink_to(other / name)
    (folder / "step_000003.partial").symlink_to(other / "step_000002")
    (folder / "step_000006").symlink_to(tmp_path / "nowhere")
    for step in (4, 6):  # the same step once more, and one where a link leads nowhere
        saver = make_saver(folder, one_rank(), told, keep=1)
        saver.save(FakeEngine(one_rank()), TrainState(step=step, tokens=1))
        saver.close()
    saver = make_saver(folder, one_rank(), told, keep=1)
    saver.save(FakeEngine(one_rank()), TrainState(step=8))
    saver.save(FakeEngine(one_rank()), TrainState(step=10))
    saver.close()
    assert not any("left over" in line or "not be begun" in line for line in told), told
    assert names(folder) == ["step_000010"]
    assert names(other) == ["step_000002", "step_000004"], "what a link leads to is not ours to delete"


def test_a_left_over_that_cannot_be_removed_is_told_once_and_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    (tmp_path / "step_000001.partial").mkdir()
    real = publish_module.shutil.rmtree

    def busy(path: Path, *args: Any, **given: Any) -> None:
        if path.name == "step_000001.partial":
            raise OSError(16, "Device or resource busy")
        real(path, *args, **given)

    monkeypatch.setattr(publish_module.shutil, "rmtree", busy)
    saver = make_saver(tmp_path, one_rank(), told)
    saver.prepare()
    for step in (2, 4):
        saver.save(FakeEngine(one_rank()), TrainState(step=step))
        saver.wait()
    assert names(tmp_path) == ["step_000001.partial", "step_000002", "step_000004"]
    assert len([line for line in told if "left over" in line]) == 1
