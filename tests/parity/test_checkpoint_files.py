"""Checkpoints of DeepSpeed's real states on disk: alike however they are written, every damage found before training and
the good one before it chosen, and bad disks survived."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stack.checkpoint.find import find_checkpoint
from stack.checkpoint.manifest import FILE_NAME, hash_of, read_manifest, verify_files
from stack.errors import CheckpointError
from tests.checkpoint_stall import AT_ONCE, BEHIND, measure, report
from tests.parity.saving_side import bad_disks, twins, two_checkpoints
from tests.ranks import Case, run_cases
from tests.unit.train_fakes import one_rank

TWINS = {
    "zero0 dp2": (0, "dp2", "fp32"),
    "zero1 dp2": (1, "dp2", "fp32"),
    "zero2 sp2": (2, "sp2", "bf16"),
    "zero3 sp2": (3, "sp2", "fp32"),
    "zero3 dp2": (3, "dp2", "bf16"),
}


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory) -> Iterator[Path | None]:
    """A disk of 8 MB, where one may be mounted."""
    place = tmp_path_factory.mktemp("small")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], check=False)
    yield place if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def outcomes(folders, place, small_disk):
    model = folders[False]
    cases = {name: Case(twins, (model, str(place / name), *case)) for name, case in TWINS.items()}
    cases["two"] = Case(two_checkpoints, (model, str(place / "two"), str(place / "foreign")))
    cases["stall"] = Case(measure, (str(place / "stall"), 1, 64, 1))
    if small_disk is not None:
        cases["disks"] = Case(bad_disks, (model, str(small_disk / "checkpoints")))
    return run_cases(2, cases, init=False)


def same(a: Any, b: Any) -> bool:
    """Equal through and through, with types, shapes, and what else torch.save keeps of a tensor."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        kept = ("dtype", "shape", "device", "requires_grad")
        alike = all(getattr(a, name) == getattr(b, name) for name in kept)
        sizes = a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        return alike and sizes and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else a == b


@pytest.mark.parametrize("name", TWINS)
def test_a_copy_written_behind_the_steps_equals_what_deepspeed_writes_at_once(outcomes, place, name):
    assert outcomes[name].get() == [0, 0], "host buffers are used again"
    written = {path.name for path in (place / name / "deepspeed").iterdir()}
    sizes = {}
    for kind in ("sync", "async"):
        folder = place / name / kind / "step_000001"
        files = read_manifest(folder).files
        verify_files(folder, read_manifest(folder))
        assert written == {file for file in files if not file.startswith("rng_rank")}
        sizes[kind] = files
    assert sizes["sync"] == sizes["async"]
    for file in written:
        loaded = [
            torch.load(place / name / kind / file, weights_only=False)
            for kind in ("deepspeed", "sync/step_000001", "async/step_000001")
        ]
        for content in loaded:
            content.pop("train_state", None)
        assert same(loaded[0], loaded[1]) and same(loaded[1], loaded[2]), file
    assert not list((place / name).rglob("*.py")), "no scripts of DeepSpeed's beside the checkpoints"


def test_the_measurement_of_stalls_runs_and_tells_both_ways_apart(outcomes):
    ranks = outcomes["stall"].get()
    text, share = report(ranks)
    assert share > 0 and "written at once" in text and "written behind" in text
    for found in ranks:
        assert found[BEHIND][0] < found[f"published {BEHIND}"][0], (
            "the steps go on before the checkpoint is published"
        )
        assert found[AT_ONCE][0] <= found[f"published {AT_ONCE}"][0]


def test_bad_disks_are_survived_until_there_are_too_many(outcomes, small_disk):
    if small_disk is None:
        pytest.skip("no right to mount a small disk here")
    values = outcomes["disks"].get()
    told = values[0][0]
    one, two = ["step_000001"], ["step_000006"]
    for _, seen in values:
        assert seen == [one, one, one, one, two], (
            "older ones stay until a newer one is published; nothing half-written"
        )
    warnings = [line for line in told if line.startswith("warning")]
    assert "GB are free on the disk of" in warnings[0] and "failure 1 in a row" in warnings[0]
    assert "No space left on device" in warnings[1] and "failure 2 in a row" in warnings[1]
    assert "Read-only file system" in warnings[2]
    for rank, (lines, _) in enumerate(values):
        (ended,) = [line for line in lines if line.startswith(f"ended on rank {rank}")]
        assert "No space left on device" in ended and "checkpoint.max_failures=2" in ended
        (last,) = [line for line in lines if line.startswith(f"last on rank {rank}")]
        assert "Read-only file system" in last


RNG = [f"rng_rank_0000{rank}.pt" for rank in (0, 1)]
MODEL = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)]
OPTIM = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
FILES = [*RNG, *MODEL, *OPTIM]


def flip(file: Path, where: float) -> None:
    """One bit of the byte at this share of the file."""
    content = bytearray(file.read_bytes())
    content[min(int(where * len(content)), len(content) - 1)] ^= 1
    file.write_bytes(content)


def cut(file: Path, keep: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: min(int(keep * len(content)), len(content) - 1)])


def put(file: Path, other: Path) -> None:
    """`other` in the place of `file`; a damage only if they differ."""
    assert file.read_bytes() != other.read_bytes()
    shutil.copyfile(other, file)


def by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


OF_A_FILE: dict[str, Callable[[Path, Path], object]] = {
    "truncated by a byte": lambda file, two: cut(file, 1.0),
    "truncated to a half": lambda file, two: cut(file, 0.5),
    "emptied": lambda file, two: file.write_bytes(b""),
    "missing": lambda file, two: file.unlink(),
    "longer": lambda file, two: file.write_bytes(file.read_bytes() + b"\0"),
    "first byte flipped": lambda file, two: flip(file, 0),
    "byte in the middle flipped": lambda file, two: flip(file, 0.5),
    "last byte flipped": lambda file, two: flip(file, 1),
    "zeros": lambda file, two: file.write_bytes(bytes(file.stat().st_size)),
    "of another step": lambda file, two: put(file, two / "step_000001" / file.name),
    "of another run": lambda file, two: put(file, two.parent / "foreign" / "step_000002" / file.name),
    "of the other kind": lambda file, two: put(file, file.with_name(OPTIM[0] if file.name in RNG else RNG[0])),
    "a folder": lambda file, two: by_folder(file),
    "a link to nothing": lambda file, two: (file.unlink(), file.symlink_to("nowhere")),
}  # fmt: skip


def edit(file: Path, change: Callable[[dict], object]) -> None:
    """A manifest that is changed by hand, and whose own checksum is made to fit."""
    content = json.loads(file.read_text())
    del content["digest"]
    change(content)
    file.write_text(json.dumps({**content, "digest": hash_of(content)}))


def exchange(folder: Path, names: list[str]) -> None:
    (folder / names[0]).rename(folder / "third")
    (folder / names[1]).rename(folder / names[0])
    (folder / "third").rename(folder / names[1])


def without_rank_1(folder: Path) -> None:
    """A checkpoint of one rank that says it is of two."""
    for name in (RNG[1], MODEL[1], OPTIM[1]):
        (folder / name).unlink()
    edit(
        folder / FILE_NAME,
        lambda content: [content["files"].pop(name) for name in (RNG[1], MODEL[1], OPTIM[1])],
    )


OF_THE_FOLDER: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "manifest missing": (FILE_NAME, lambda path, two: (path / FILE_NAME).unlink()),
    "manifest emptied": (FILE_NAME, lambda path, two: (path / FILE_NAME).write_text("")),
    "manifest truncated": (FILE_NAME, lambda path, two: cut(path / FILE_NAME, 1.0)),
    "manifest halved": (FILE_NAME, lambda path, two: cut(path / FILE_NAME, 0.5)),
    "manifest without content": (FILE_NAME, lambda path, two: (path / FILE_NAME).write_text("{}")),
    "manifest a list": (FILE_NAME, lambda path, two: (path / FILE_NAME).write_text("[1]")),
    "manifest a number": (FILE_NAME, lambda path, two: (path / FILE_NAME).write_text("7")),
    "manifest no text": (FILE_NAME, lambda path, two: (path / FILE_NAME).write_bytes(b"\xff\xfe\x00")),
    "manifest a folder": (FILE_NAME, lambda path, two: by_folder(path / FILE_NAME)),
    "manifest of another step": (FILE_NAME, lambda path, two: put(path / FILE_NAME, two / "step_000001" / FILE_NAME)),
    "manifest of another run": ("theirs", lambda path, two: put(path / FILE_NAME, two.parent / "foreign/step_000002" / FILE_NAME)),
    "manifest of a later version": (FILE_NAME, lambda path, two: edit(path / FILE_NAME, lambda c: c.update(later=1))),
    "manifest says another size": (RNG[0], lambda path, two: edit(path / FILE_NAME, lambda c: c["files"].update({RNG[0]: 3}))),
    "manifest says another checksum": (OPTIM[1], lambda path, two: edit(path / FILE_NAME, lambda c: c["checksums"].update({OPTIM[1]: "0" * 32}))),
    "manifest forgets a file": (OPTIM[0], lambda path, two: edit(path / FILE_NAME, lambda c: c["files"].pop(OPTIM[0]))),
    "manifest names a file that is not there": ("more.pt", lambda path, two: edit(path / FILE_NAME, lambda c: c["files"].update({"more.pt": 3}))),
    "manifest whose files are a list": (FILE_NAME, lambda path, two: edit(path / FILE_NAME, lambda c: c.update(files=[1]))),
    "manifest without a layout": (FILE_NAME, lambda path, two: edit(path / FILE_NAME, lambda c: c.update(layout={}))),
    **{
        f"manifest flipped at {place}": (FILE_NAME, lambda path, two, place=place: flip(path / FILE_NAME, place))
        for place in (0.1, 0.3, 0.5, 0.7, 0.9)
    },
    "files of a rank missing": ("[1]", lambda path, two: without_rank_1(path)),
    "random states of the ranks exchanged": (RNG[0], lambda path, two: exchange(path, RNG)),
    "optimizer shards of the ranks exchanged": (OPTIM[1], lambda path, two: exchange(path, OPTIM)),
    "files of two kinds exchanged": (MODEL[0], lambda path, two: exchange(path, [MODEL[0], OPTIM[0]])),
    "a wrong rank's random states": (RNG[1], lambda path, two: put(path / RNG[1], path / RNG[0])),
    "a wrong rank's optimizer shard": (OPTIM[0], lambda path, two: put(path / OPTIM[0], path / OPTIM[1])),
    "a shard of a third rank": ("zero_pp_rank_2", lambda path, two: (path / "zero_pp_rank_2_mp_rank_00_optim_states.pt").write_text("x")),
    "a foreign file": ("notes.json", lambda path, two: (path / "notes.json").write_text("x")),
    "a foreign folder": ("inner/a.pt", lambda path, two: shutil.copytree(two / "step_000001", path / "inner") and (path / "inner/a.pt").write_text("x")),
    "emptied": (FILE_NAME, lambda path, two: (shutil.rmtree(path), path.mkdir())),
    "another step under its name": (FILE_NAME, lambda path, two: (shutil.rmtree(path), shutil.copytree(two / "step_000001", path))),
    "another run's checkpoint": ("theirs", lambda path, two: (shutil.rmtree(path), shutil.copytree(two.parent / "foreign/step_000002", path))),
}  # fmt: skip

DAMAGES: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    f"{file}, {how}": (file, lambda path, two, file=file, damage=damage: damage(path / file, two))
    for how, damage in OF_A_FILE.items()
    for file in FILES
} | OF_THE_FOLDER


def test_there_are_many_damages():
    assert len(DAMAGES) >= 60


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_good_one_before_it_chosen(outcomes, place, tmp_path, name):
    outcomes["two"].get()
    shutil.copytree(place / "two", tmp_path / "own")
    victim, (named, damage) = tmp_path / "own" / "step_000002", DAMAGES[name]
    damage(victim, place / "two")
    told: list[str] = []
    found = find_checkpoint(tmp_path / "own", "auto", "mine", one_rank(), told.append)
    assert found is not None and found.path.name == "step_000001"
    (warning,) = [line for line in told if "warning" in line]
    assert "step_000002" in warning and named in warning
    if name != "another run's checkpoint":  # which is whole, and may be asked for by its path
        with pytest.raises(CheckpointError, match="step_000002"):
            find_checkpoint(tmp_path / "own", str(victim), "mine", one_rank(), told.append)


def test_what_file_managers_and_network_disks_leave_behind_is_no_damage(outcomes, place, tmp_path):
    outcomes["two"].get()
    shutil.copytree(place / "two", tmp_path / "own")
    (tmp_path / "own" / "step_000002" / ".DS_Store").write_text("x")
    os.mkdir(tmp_path / "own" / "step_000002" / "empty")
    found = find_checkpoint(tmp_path / "own", "auto", "mine", one_rank(), print)
    assert found is not None and found.path.name == "step_000002"
