"""Checkpoints: complete or not taken, the right one found, misfits refused, everything put back."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stack.checkpoint.load import Checkpoint, check_layout, find_checkpoint, load_checkpoint, set_aside_newer
from stack.checkpoint.manifest import read_manifest, step_folders
from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState, model_fingerprint
from stack.dist.topology import Topology
from stack.errors import CheckpointError
from tests.unit.train_fakes import FakeEngine, FakeLoader, on_threads, one_rank

LAYOUT = {"world": 1, "sp": 1, "stage": 3}


def make_saver(folder: Path, topology: Topology, keep: int = 2) -> Saver:
    return Saver(folder, topology, LAYOUT | {"world": topology.world}, 12, keep)


def save_steps(folder: Path, *steps: int, keep: int = 0) -> None:
    topology = one_rank()
    saver = make_saver(folder, topology, keep)
    for step in steps:
        saver.save(FakeEngine(topology), TrainState(step=step, loader={"place": step}))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def told() -> list[str]:
    return []


def test_save_leaves_one_folder_with_the_files_of_every_rank_and_their_sizes(tmp_path: Path) -> None:
    def save(topology: Topology) -> Path:
        return make_saver(tmp_path, topology).save(FakeEngine(topology), TrainState(step=5))

    paths = on_threads(2, save)
    assert paths == [tmp_path / "step_000005"] * 2
    assert names(tmp_path) == ["step_000005"]
    manifest = read_manifest(paths[0])
    assert set(manifest.files) == {
        "rng_rank_00000.pt",
        "rng_rank_00001.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    }
    assert all((paths[0] / name).stat().st_size == size > 0 for name, size in manifest.files.items())
    assert (manifest.step, manifest.steps_planned, manifest.layout["world"]) == (5, 12, 2)
    assert {"torch", "deepspeed", "transformers", "python"} <= set(manifest.versions)


def test_files_of_other_nodes_that_are_not_there_stop_the_save(tmp_path: Path) -> None:
    class NodeLocal(FakeEngine):
        def save(self, folder: Path, tag: str, client_state: dict[str, Any]) -> None:
            if self.topology.rank == 0:
                super().save(folder, tag, client_state)

    results = on_threads(
        2, lambda topology: make_saver(tmp_path, topology).save(NodeLocal(topology), TrainState(step=5))
    )
    assert isinstance(results[0], CheckpointError)
    assert "1 of 2 optimizer shards" in str(results[0])
    assert step_folders(tmp_path) == []


def test_failed_save_ends_with_a_clear_error_and_leaves_the_older_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)

    class FullDisk(FakeEngine):
        def save(self, folder: Path, tag: str, client_state: dict[str, Any]) -> None:
            (folder / tag / "half").write_text("cut sh")
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        make_saver(tmp_path, one_rank()).save(FullDisk(one_rank()), TrainState(step=7))
    assert find_checkpoint(tmp_path, "auto", print).manifest.step == 5  # type: ignore[union-attr]
    save_steps(tmp_path, 8)  # and the next save clears the left-overs
    assert names(tmp_path) == ["step_000005", "step_000008"]


@pytest.mark.parametrize("keep, left", [(1, [30]), (2, [20, 30]), (0, [5, 10, 20, 30])])
def test_retention_keeps_the_newest(tmp_path: Path, keep: int, left: list[int]) -> None:
    save_steps(tmp_path, 5, 10, 20, 30, keep=keep)
    assert names(tmp_path) == [f"step_{step:06d}" for step in left]


def test_retention_counts_only_complete_ones_and_never_deletes_the_one_just_saved(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 10)
    (tmp_path / "step_000010" / "manifest.json").unlink()
    save_steps(tmp_path, 12, keep=2)
    assert names(tmp_path) == ["step_000005", "step_000012"]
    save_steps(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step_000003"]


def test_saving_over_a_broken_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    (tmp_path / "step_000005" / "stray").write_text("x")
    (tmp_path / "step_000005" / "manifest.json").unlink()
    save_steps(tmp_path, 5)
    assert "stray" not in names(tmp_path / "step_000005")
    read_manifest(tmp_path / "step_000005")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


BREAKS: dict[str, Callable[[Path], object]] = {
    "truncated shard": lambda path: truncate(path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "missing shard": lambda path: (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink(),
    "missing random state": lambda path: (path / "rng_rank_00000.pt").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "truncated manifest": lambda path: truncate(path / "manifest.json"),
    "foreign manifest": lambda path: (path / "manifest.json").write_text("{}"),
    "emptied": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_newest_is_passed_over_with_a_warning_by_auto_and_refused_by_path(
    tmp_path: Path, told: list[str], name: str
) -> None:
    save_steps(tmp_path, 5, 10)
    broken = tmp_path / "step_000010"
    BREAKS[name](broken)
    found = find_checkpoint(tmp_path, "auto", told.append)
    assert found is not None and found.path.name == "step_000005"
    assert len(told) == 1 and "passing over" in told[0] and "step_000010" in told[0]
    with pytest.raises(CheckpointError, match="step_000010"):
        find_checkpoint(tmp_path, str(broken), told.append)


def test_auto_starts_anew_and_says_so_where_there_is_nothing(tmp_path: Path, told: list[str]) -> None:
    assert find_checkpoint(tmp_path / "checkpoints", "auto", told.append) is None
    (tmp_path / "step_000004.partial").mkdir()  # killed in its first save
    assert find_checkpoint(tmp_path, "auto", told.append) is None
    assert all("starting from step 0" in line for line in told) and len(told) == 2


def test_auto_refuses_to_start_anew_over_broken_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    (tmp_path / "step_000005" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoint"):
        find_checkpoint(tmp_path, "auto", print)


def test_none_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "none", print) is None
    save_steps(tmp_path, 5)
    with pytest.raises(CheckpointError, match="resume=none"):
        find_checkpoint(tmp_path, "none", print)


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_explicit_path_without_a_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "elsewhere"
    if kind == "empty":
        path.mkdir()
    with pytest.raises(CheckpointError, match="elsewhere"):
        find_checkpoint(tmp_path / "own", str(path), print)


def test_explicit_path_is_found_relative_to_the_start_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path / "other", 5)
    monkeypatch.chdir(tmp_path)
    found = find_checkpoint(tmp_path / "own", "other/step_000005", print)
    assert found is not None and found.path == tmp_path / "other" / "step_000005"


def test_going_back_to_an_older_checkpoint_sets_the_newer_ones_aside(tmp_path: Path, told: list[str]) -> None:
    save_steps(tmp_path, 5, 10, 15)
    chosen = find_checkpoint(tmp_path, str(tmp_path / "step_000005"), told.append)
    assert chosen is not None
    set_aside_newer(tmp_path, chosen, told.append)
    assert names(tmp_path) == ["step_000005", "step_000010.abandoned", "step_000015.abandoned"]
    save_steps(tmp_path, 10)
    set_aside_newer(tmp_path, chosen, told.append)
    assert "step_000010.abandoned1" in names(tmp_path)
    foreign = Checkpoint(tmp_path.parent / "step_000001", chosen.manifest)
    set_aside_newer(tmp_path, foreign, told.append)  # another run's checkpoint: ours stay
    assert "step_000005" in names(tmp_path)


@pytest.mark.parametrize("key, now", [("world", 4), ("sp", 2), ("stage", 1)])
def test_another_layout_is_refused_naming_both_values_and_the_way_out(
    tmp_path: Path, key: str, now: int
) -> None:
    save_steps(tmp_path, 5)
    found = find_checkpoint(tmp_path, "auto", print)
    assert found is not None
    check_layout(found, LAYOUT)
    with pytest.raises(CheckpointError, match=rf"{key}: saved {LAYOUT[key]}, now {now}.*model\.path"):
        check_layout(found, LAYOUT | {key: now})


def test_everything_is_put_back_on_every_rank(tmp_path: Path) -> None:
    state = TrainState(step=5, tokens=70, targets=64, skipped_steps=1, loader={"place": 5})

    def save(topology: Topology) -> None:
        engine = FakeEngine(topology)
        engine.weight += topology.rank
        make_saver(tmp_path, topology).save(engine, state)

    assert on_threads(2, save) == [None, None]

    def load(topology: Topology) -> tuple[float, int, TrainState]:
        engine, loader = FakeEngine(topology), FakeLoader([])
        found = Checkpoint(tmp_path / "step_000005", read_manifest(tmp_path / "step_000005"))
        loaded = load_checkpoint(found, engine, loader, topology)
        return float(engine.weight), loader.place, loaded

    assert on_threads(2, load) == [(1.0, 5, state), (2.0, 5, state)]


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)

    random.gauss(0, 1)  # leaves a second number waiting in Python's generator
    np.random.randn(1)
    save_steps(tmp_path, 5)
    expected = draw()
    draw()
    topology = one_rank()
    found = find_checkpoint(tmp_path, "auto", print)
    assert found is not None
    load_checkpoint(found, FakeEngine(topology), FakeLoader([]), topology)
    assert draw() == expected


def test_state_of_another_version_is_refused_by_name() -> None:
    values = TrainState(step=3).to_dict()
    assert TrainState.from_dict(json.loads(json.dumps(values)) | {"later": {}}) == TrainState(step=3)
    del values["targets"], values["loader"]
    with pytest.raises(CheckpointError, match="lacks targets, loader"):
        TrainState.from_dict(values)


def test_fingerprint_is_the_same_for_shards_and_differs_by_name_and_shape() -> None:
    whole, sharded = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    for parameter in sharded.parameters():
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    assert model_fingerprint(whole) == model_fingerprint(sharded)
    assert model_fingerprint(whole)["parameters"] == 16
    others = [
        torch.nn.Linear(4, 3),
        torch.nn.Linear(3, 4, bias=False),
        torch.nn.Sequential(torch.nn.Linear(3, 4)),
    ]
    assert len({model_fingerprint(model)["hash"] for model in [whole, *others]}) == 4


def test_frozen_parameters_are_part_of_the_fingerprint() -> None:
    """DeepSpeed's states hold what is trained: under another selection they do not load, and say so late and obscurely."""
    free, frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    assert model_fingerprint(frozen)["frozen"] == 2
    assert model_fingerprint(free)["hash"] != model_fingerprint(frozen)["hash"]


def test_a_runs_folder_in_place_of_a_checkpoint_names_the_newest(tmp_path: Path) -> None:
    for step in (3, 5):
        (tmp_path / "run" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"Fix: name one checkpoint, .*step_000005$"):
        find_checkpoint(tmp_path / "other", str(tmp_path / "run"), print)
