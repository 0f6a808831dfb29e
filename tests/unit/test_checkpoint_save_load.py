"""Checkpoints: complete or not taken, the right one found, misfits refused, everything put back."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stack.checkpoint.differences import SPOILING
from stack.checkpoint.find import Checkpoint, find_checkpoint
from stack.checkpoint.load import (
    check_layout,
    check_settings,
    fits_as_saved,
    load_checkpoint,
    set_aside_newer,
    way_of,
)
from stack.checkpoint.manifest import Manifest, read_manifest, write_manifest
from stack.checkpoint.publish import Origin
from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState, model_fingerprint
from stack.config.convert import known_keys
from stack.config.schema_checkpoint import CheckpointConfig
from stack.dist.topology import Topology
from stack.errors import CheckpointError
from tests.unit.train_fakes import FakeEngine, FakeLoader, on_threads, one_rank

LAYOUT = {"world": 1, "sp": 1, "stage": 3}


def make_saver(folder: Path, topology: Topology, keep: int = 2, **policy: Any) -> Saver:
    origin = Origin("run", LAYOUT | {"world": topology.world}, 12)
    return Saver(folder, topology, origin, CheckpointConfig(keep=keep, **policy))


def save_steps(folder: Path, *steps: int, keep: int = 0) -> None:
    topology = one_rank()
    saver = make_saver(folder, topology, keep)
    for step in steps:
        saver.save(FakeEngine(topology), TrainState(step=step, loader={"place": step}))
    saver.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def find(folder: Path, resume: str, tell: Callable[[str], None]) -> Checkpoint | None:
    return find_checkpoint(folder, resume, "run", one_rank(), tell)


@pytest.fixture
def told() -> list[str]:
    return []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_another_run(path: Path) -> None:
    write_manifest(path, replace(read_manifest(path), run="other"))


BREAKS: dict[str, Callable[[Path], object]] = {
    "truncated shard": lambda path: truncate(path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "missing shard": lambda path: (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink(),
    "missing random state": lambda path: (path / "rng_rank_00000.pt").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "truncated manifest": lambda path: truncate(path / "manifest.json"),
    "foreign manifest": lambda path: (path / "manifest.json").write_text("{}"),
    "emptied": lambda path: (shutil.rmtree(path), path.mkdir()),
    "flipped bit": lambda path: flip(path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "files of another step": lambda path: shutil.copytree(
        path.with_name("step_000005"), path, dirs_exist_ok=True
    ),
    "another run's": lambda path: of_another_run(path),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_newest_is_passed_over_with_a_warning_by_auto_and_refused_by_path(
    tmp_path: Path, told: list[str], name: str
) -> None:
    save_steps(tmp_path, 5, 10)
    broken = tmp_path / "step_000010"
    BREAKS[name](broken)
    found = find(tmp_path, "auto", told.append)
    assert found is not None and found.path.name == "step_000005"
    assert len(told) == 1 and "passing over" in told[0] and "step_000010" in told[0]
    if name != "another run's":  # which may be asked for by name
        refusal = r"step_000010.*Fix: name one checkpoint; the newest whole one: .*step_000005$"
        with pytest.raises(CheckpointError, match=refusal):
            find(tmp_path, str(broken), told.append)
        with pytest.raises(CheckpointError, match=refusal):
            find(tmp_path, "10", told.append)


def test_auto_starts_anew_and_says_so_where_there_is_nothing(tmp_path: Path, told: list[str]) -> None:
    assert find(tmp_path / "checkpoints", "auto", told.append) is None
    (tmp_path / "step_000004.partial").mkdir()  # killed in its first save
    assert find(tmp_path, "auto", told.append) is None
    assert all("starting from step 0" in line for line in told) and len(told) == 2


def test_auto_refuses_to_start_anew_over_broken_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    (tmp_path / "step_000005" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoint"):
        find(tmp_path, "auto", print)


def test_none_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    assert find(tmp_path, "none", print) is None
    save_steps(tmp_path, 5)
    with pytest.raises(CheckpointError, match="resume=none"):
        find(tmp_path, "none", print)


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_explicit_path_without_a_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "elsewhere"
    if kind == "empty":
        path.mkdir()
    with pytest.raises(CheckpointError, match="elsewhere"):
        find(tmp_path / "own", str(path), print)


def test_explicit_path_is_found_relative_to_the_start_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path / "other", 5)
    monkeypatch.chdir(tmp_path)
    found = find(tmp_path / "own", "other/step_000005", print)
    assert found is not None and found.path == tmp_path / "other" / "step_000005"


def test_going_back_to_an_older_checkpoint_sets_the_newer_ones_aside(tmp_path: Path, told: list[str]) -> None:
    save_steps(tmp_path, 5, 10, 15)
    chosen = find(tmp_path, str(tmp_path / "step_000005"), told.append)
    assert chosen is not None
    set_aside_newer(tmp_path, chosen, told.append)
    assert names(tmp_path) == ["step_000005", "step_000010.abandoned", "step_000015.abandoned"]
    save_steps(tmp_path, 10)
    set_aside_newer(tmp_path, chosen, told.append)
    assert "step_000010.abandoned1" in names(tmp_path)
    foreign = Checkpoint(tmp_path.parent / "step_000001", chosen.manifest)
    set_aside_newer(tmp_path, foreign, told.append)  # another run's checkpoint: ours stay
    assert "step_000005" in names(tmp_path)


def checkpoint_of(layout: dict[str, Any], **settings: Any) -> Checkpoint:
    return Checkpoint(Path("step_000005"), Manifest(5, layout, 12, {}, {}, settings=settings))


def test_other_ranks_and_stages_are_taken_and_cut_anew() -> None:
    layout = LAYOUT | {"rows_per_step": 4, "nvme": False, "states_on": "cuda", "sub_group": 10**9}
    saved = checkpoint_of(layout)
    assert fits_as_saved(saved, layout) and fits_as_saved(saved, layout | {"sp": 2})
    changes = (("world", 4), ("stage", 1), ("states_on", "host"), ("states_on", "cpu"), ("sub_group", 7))
    for key, now in changes:
        check_layout(saved, layout | {key: now})
        assert not way_of(saved, layout | {key: now}).as_saved


def test_states_on_nvme_are_read_parameter_by_parameter() -> None:
    """By the run that saved them too: DeepSpeed would read a part of them back."""
    layout = LAYOUT | {"rows_per_step": 4, "nvme": True}
    saved = checkpoint_of(layout)
    for now in (layout, layout | {"nvme": False}):
        check_layout(saved, now)
        assert not fits_as_saved(saved, now)


@pytest.mark.parametrize(
    "change, text",
    [
        (
            {"rows_per_step": 8, "accumulation": 2},
            r"rows_per_step: saved 4, now 8.*engine\.accumulation=1 keeps 4",
        ),
        ({"rows_per_step": 6, "accumulation": 1}, "another number of ranks"),
        (
            {"model": {"parameters": 2}},
            r"holds another model: saved {'parameters': 1}, now {'parameters': 2}",
        ),
    ],
)
def test_a_layout_that_cannot_be_had_is_refused_with_both_and_the_way_out(
    change: dict[str, Any], text: str
) -> None:
    layout = LAYOUT | {"rows_per_step": 4, "nvme": False, "model": {"parameters": 1}}
    saved = checkpoint_of(layout)
    check_layout(saved, layout)
    with pytest.raises(CheckpointError, match=text):
        check_layout(saved, layout | change)
    if "rows_per_step" in change:
        check_layout(saved, layout | change, ["engine.accumulation"])


SETTINGS: dict[str, Any] = {
    "name": "a",
    "seed": 1,
    "model": {"architecture": {"hidden_size": 32}, "tokenizer": None},
    "data": {"path": "books", "micro_batch": 1},
    "optim": {"name": "adamw", "lr": 0.1},
    "checkpoint": {"every": 5},
}


def test_changed_settings_are_listed_and_spoiling_ones_refused_unless_forced_by_name() -> None:
    saved = checkpoint_of(LAYOUT, **SETTINGS)
    assert check_settings(saved, SETTINGS, []) == []
    now = json.loads(json.dumps(SETTINGS))
    now["name"], now["checkpoint"]["every"] = "b", 7  # of no consequence
    now["optim"]["lr"], now["data"]["micro_batch"] = 0.2, 2
    harmless = [str(each) for each in check_settings(saved, now, [])]
    assert harmless == ["data.micro_batch: saved 1, now 2", "optim.lr: saved 0.1, now 0.2"]
    now["data"]["path"], now["model"]["architecture"] = "novels", {"hidden_size": 32, "head_dim": 8}
    now["optim"]["name"] = "sgd"
    with pytest.raises(CheckpointError) as caught:
        check_settings(saved, now, [])
    for part in (
        "data.path: saved 'books', now 'novels' (the text)",
        "model.architecture.head_dim: saved None, now 8 (the model)",
        "optim.name: saved 'adamw', now 'sgd' (the optimizer",
        "checkpoint.force=[model.architecture.head_dim,data.path,optim.name]",
        "weights_from=step_000005",
    ):
        assert part in str(caught.value)
    assert "micro_batch" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"force=\[optim.name\]"):
        check_settings(saved, now, ["data", "model.architecture"])
    assert len(check_settings(saved, now, ["data.path", "model", "optim.name"])) == 5


def test_every_name_that_spoils_a_run_is_a_setting() -> None:
    assert [name for name in SPOILING if name not in known_keys()] == []


def test_damage_is_found_by_whichever_rank_reads_it_and_all_take_the_older_one(tmp_path: Path) -> None:
    """The file belongs to one rank's share only, and that rank depends on the number of ranks."""

    def save(topology: Topology) -> None:
        saver = make_saver(tmp_path, topology, 0)
        for step in (5, 10):
            saver.save(FakeEngine(topology), TrainState(step=step))
        saver.wait()

    assert on_threads(2, save) == [None, None]
    for file in sorted((tmp_path / "step_000010").glob("*.pt")):
        whole = file.read_bytes()
        flip(file)
        for world in (1, 2, 3):
            found = on_threads(
                world, lambda topology: find_checkpoint(tmp_path, "auto", "run", topology, print)
            )
            assert [each.path.name for each in found] == ["step_000005"] * world, file.name
        file.write_bytes(whole)
    assert find(tmp_path, "auto", print).path.name == "step_000010"  # type: ignore[union-attr]


def test_another_runs_checkpoint_is_refused_where_the_run_has_its_own(tmp_path: Path) -> None:
    save_steps(tmp_path / "own", 5)
    save_steps(tmp_path / "other", 7)
    assert find(tmp_path / "empty", str(tmp_path / "other" / "step_000007"), print) is not None
    with pytest.raises(CheckpointError, match=r"none of this run's checkpoints.*checkpoint\.resume=auto"):
        find(tmp_path / "own", str(tmp_path / "other" / "step_000007"), print)


def test_what_does_not_fit_is_refused_before_its_bytes_are_read(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 10)
    flip(tmp_path / "step_000010" / "rng_rank_00000.pt")

    def judge(found: Checkpoint) -> None:
        raise CheckpointError(f"{found.path.name} does not fit")

    with pytest.raises(CheckpointError, match="step_000010 does not fit"):
        find_checkpoint(tmp_path, "auto", "run", one_rank(), print, judge)


def test_everything_is_put_back_on_every_rank(tmp_path: Path) -> None:
    state = TrainState(step=5, tokens=70, targets=64, skipped_steps=1, loader={"place": 5})

    def save(topology: Topology) -> None:
        engine = FakeEngine(topology)
        engine.weight += topology.rank
        saver = make_saver(tmp_path, topology)
        saver.save(engine, state)
        saver.wait()

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
    found = find(tmp_path, "auto", print)
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


def test_a_runs_folder_in_place_of_a_checkpoint_names_the_newest_whole_one(tmp_path: Path) -> None:
    save_steps(tmp_path / "run" / "checkpoints", 3, 5)
    flip(tmp_path / "run" / "checkpoints" / "step_000005" / "rng_rank_00000.pt")
    with pytest.raises(CheckpointError, match=r"Fix: name one checkpoint; .*step_000003$"):
        find(tmp_path / "other", str(tmp_path / "run"), print)


def test_notes_beside_a_checkpoints_files_are_named_and_do_no_harm(tmp_path: Path, told: list[str]) -> None:
    save_steps(tmp_path, 5, 10)
    (tmp_path / "step_000010" / "notes.md").write_text("the good one")
    found = find(tmp_path, "auto", told.append)
    assert found is not None and found.path.name == "step_000010"
    assert told == [f"warning: {tmp_path / 'step_000010'} holds files that were not saved with it: notes.md"]
    for name in ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "a.json", "model.safetensors"):
        stray = tmp_path / "step_000010" / name
        stray.write_text("x")
        assert find(tmp_path, "auto", told.append).path.name == "step_000005"  # type: ignore[union-attr]
        stray.unlink()


def test_a_step_that_was_set_aside_is_named_with_the_way_to_take_it_up_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 10)
    (tmp_path / "step_000010").rename(tmp_path / "step_000010.abandoned")
    aside = rf"set aside.*mv {tmp_path}/step_000010\.abandoned {tmp_path}/step_000010$"
    for resume in ("10", str(tmp_path / "step_000010")):
        with pytest.raises(CheckpointError, match=aside):
            find(tmp_path, resume, print)
    with pytest.raises(CheckpointError, match=r"step_000007.*newest whole one: .*step_000005$"):
        find(tmp_path, "7", print)
