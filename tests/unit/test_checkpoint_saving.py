"""Saving: complete or absent, behind the steps, one at a time; what fails is said, counted and deletes nothing."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import stack.checkpoint.save as save_module
import stack.checkpoint.writer as writer
from stack.checkpoint.manifest import hash_file, hash_of, read_manifest, step_folders, verify_files
from stack.checkpoint.state import CLIENT_KEY, TrainState
from stack.dist.topology import Topology
from stack.errors import CheckpointError
from stack.train.hooks import CheckpointHook, StallHook
from tests.unit.saving_rig import Gate, make_saver, names, save_steps
from tests.unit.train_fakes import FakeEngine, on_threads, one_rank, shard_name


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_leaves_one_folder_that_says_what_it_holds(tmp_path: Path, asynchronous: bool) -> None:
    def save(topology: Topology) -> None:
        saver = make_saver(tmp_path, topology, asynchronous=asynchronous)
        state = TrainState(step=5, tokens=70)
        assert saver.save(FakeEngine(topology), state, {"loss": 2.5}) is None
        if asynchronous:
            saver.wait()
        assert names(tmp_path) == ["step_000005"]

    assert on_threads(2, save) == [None, None]
    path = tmp_path / "step_000005"
    manifest = read_manifest(path)
    expected = {"rng_rank_00000.pt", "rng_rank_00001.pt", shard_name(0), shard_name(1)}
    assert set(manifest.files) == set(manifest.checksums) == expected
    assert set(names(path)) == expected | {"manifest.json"}, "no records of the save are left"
    assert all((path / name).stat().st_size == size > 0 for name, size in manifest.files.items())
    assert all(hash_file(path / name) == value for name, value in manifest.checksums.items())
    for share in range(3):
        verify_files(path, manifest, share, 3)
    assert (manifest.step, manifest.steps_planned, manifest.layout["world"]) == (5, 12, 2)
    assert (manifest.tokens, manifest.run, manifest.wandb_run_id) == (70, "mine", "wb1")
    assert (manifest.settings, manifest.config_hash) == ({"a": 1}, hash_of({"a": 1}))
    assert manifest.metrics == {"loss": 2.5}
    assert {"torch", "deepspeed", "transformers", "python", "commit"} == set(manifest.versions)


def test_a_folder_that_the_nodes_do_not_share_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "SHARED_S", 0.2)

    def save(topology: Topology) -> None:
        own = tmp_path / f"node{topology.rank}"
        saver = make_saver(own, topology, max_failures=0)
        with pytest.raises(CheckpointError, match="rank 1: the folder"):
            saver.save(FakeEngine(topology), TrainState(step=5))

    assert on_threads(2, save) == [None, None]
    assert names(tmp_path / "node0") == []


def test_files_that_are_missing_at_publication_publish_nothing(tmp_path: Path) -> None:
    class Forgetful(FakeEngine):
        def capture(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {} if self.topology.rank else super().capture(*args, **kwargs)

    def save(topology: Topology) -> None:
        saver = make_saver(tmp_path, topology)
        saver.save(Forgetful(topology), TrainState(step=5))
        with pytest.raises(CheckpointError, match="1 of 2 optimizer shards"):
            saver.wait()

    assert on_threads(2, save) == [None, None]
    assert names(tmp_path) == []


def test_the_state_saved_is_that_of_the_call_and_the_steps_go_on_meanwhile(
    tmp_path: Path, gate: Gate
) -> None:
    topology = one_rank()
    engine, saver = FakeEngine(topology), make_saver(tmp_path, topology)
    state = TrainState(step=5, loader={"place": [5]})
    random.seed(3)
    before = random.getstate()
    saver.save(engine, state)
    assert gate.reached.wait(20) and step_folders(tmp_path) == []
    for step in (6, 7):  # the loop is not held up while nothing can be written
        engine.weight += 1
        state.step = step
        state.loader["place"].append(step)
        random.random()
        saver.poll()
    gate.open.set()
    saver.wait()
    path = tmp_path / "step_000005"
    content = torch.load(path / shard_name(0), weights_only=True)
    assert content["weight"] == 1.0
    assert content["state"][CLIENT_KEY] == TrainState(step=5, loader={"place": [5]}).to_dict()
    version, internal, gauss = torch.load(path / "rng_rank_00000.pt", weights_only=True)["python"]
    assert (version, tuple(internal), gauss) == before
    saver.save(engine, state)
    saver.wait()
    assert names(tmp_path) == ["step_000005", "step_000007"]


def test_a_slow_disk_holds_the_next_save_back_and_never_two_are_under_way(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    monkeypatch.setattr(save_module, "NEWS_S", 0.0)
    flights, under_way = [], []

    class Counted(writer.Flight):
        def __init__(self, *args: Any, **kwargs: Any):
            under_way.append(sum(not flight.done.is_set() for flight in flights))
            flights.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(save_module, "Flight", Counted)
    saver = make_saver(tmp_path, one_rank(), told)
    saver.save(FakeEngine(one_rank()), TrainState(step=1))
    second = threading.Thread(
        target=saver.save, args=(FakeEngine(one_rank()), TrainState(step=2)), daemon=True
    )
    second.start()
    second.join(0.3)
    assert second.is_alive() and len(flights) == 1, "it waits for the first"
    gate.open.set()
    second.join(20)
    saver.wait()
    assert under_way == [0, 0] and names(tmp_path) == ["step_000001", "step_000002"]
    assert saver.take_stall_s() >= 0.3 and saver.take_stall_s() == 0
    assert any("the steps wait for the disk" in line for line in told)


def test_a_write_that_fails_on_one_rank_is_told_to_all_publishes_and_deletes_nothing_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 5, 6)
    gate = Gate(monkeypatch, closed=False)
    told: list[str] = []

    def run(topology: Topology) -> list[str]:
        seen = []
        saver = make_saver(tmp_path, topology, told, keep=1, max_failures=2)
        for step in (7, 8):
            if topology.rank == 1:
                gate.broken = OSError(28, "No space left on device")
            topology.barrier()
            saver.save(FakeEngine(topology), TrainState(step=step))
            saver._settle()
            topology.barrier()
            seen.append(",".join(names(tmp_path)))
            topology.barrier()
        gate.broken = None
        topology.barrier()
        saver.save(FakeEngine(topology), TrainState(step=9))
        saver.wait()
        topology.barrier()
        seen.append(",".join(names(tmp_path)))
        return seen

    rest = "step_000005,step_000006"
    assert on_threads(2, run) == [[rest, rest, "step_000009"]] * 2, "and nothing half-written is left"
    warnings = [line for line in told if line.startswith("warning")]
    assert len(warnings) == 2
    assert "No space left on device" in warnings[0] and "step_000007" in warnings[0]
    assert "failure 1 in a row" in warnings[0] and "failure 2 in a row" in warnings[1]


@pytest.mark.parametrize("max_failures", [0, 2])
def test_failures_in_a_row_end_the_run_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_failures: int
) -> None:
    gate = Gate(monkeypatch, closed=False)
    gate.broken = OSError(5, "Input/output error")
    reached = []

    def run(topology: Topology) -> str:
        saver = make_saver(tmp_path, topology, max_failures=max_failures)
        hook = CheckpointHook(saver, FakeEngine(topology), every=2, final=True, total_steps=99)
        try:
            for step in range(1, 20):
                if topology.is_main:
                    reached.append(step)
                hook.after_step(TrainState(step=step), {})
                if saver._flight is not None:
                    saver._flight.done.wait(20)
        except CheckpointError as error:
            return str(error)
        return ""

    for error in on_threads(2, run):
        assert f"checkpoint.max_failures={max_failures}" in error and "Input/output error" in error
    assert reached[-1] == 2 * (max_failures + 1) + 1, "heard of at the step behind the save"


def test_a_success_between_them_starts_the_count_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, saver = Gate(monkeypatch, closed=False), make_saver(tmp_path, one_rank(), max_failures=1)
    for step, broken in enumerate([True, False, True, False], start=1):
        gate.broken = OSError(5, "Input/output error") if broken else None
        saver.save(FakeEngine(one_rank()), TrainState(step=step))
        saver._settle()
    assert names(tmp_path) == ["step_000002", "step_000004"]


@pytest.mark.parametrize("at_the_end", ["close", "wait"])
def test_a_failure_of_the_last_save_is_an_error_whatever_failures_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_end: str
) -> None:
    gate, saver = Gate(monkeypatch, closed=False), make_saver(tmp_path, one_rank(), max_failures=9)
    gate.broken = OSError(28, "No space left on device")
    hook = CheckpointHook(saver, FakeEngine(one_rank()), every=0, final=True, total_steps=3)
    for step in (1, 2, 3):
        hook.after_step(TrainState(step=step), {})
    with pytest.raises(CheckpointError, match=r"step_000003.*No space left on device"):
        (hook.close if at_the_end == "close" else saver.wait)()


def test_what_the_disk_gives_back_is_compared_before_anything_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writer.write_chunk

    def flip(descriptor: int, chunk: memoryview) -> None:
        real(descriptor, memoryview(bytes([chunk[0] ^ 1]) + bytes(chunk[1:])))

    monkeypatch.setattr(writer, "write_chunk", flip)
    saver = make_saver(tmp_path, one_rank())
    saver.save(FakeEngine(one_rank()), TrainState(step=3))
    with pytest.raises(CheckpointError, match=r"reads back with checksum"):
        saver.wait()
    assert names(tmp_path) == []


def test_a_disk_without_room_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1_500_000))
    saver = make_saver(tmp_path, one_rank(), told)

    class Large(FakeEngine):
        def capture(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            weights = torch.zeros(1_000_000)
            return super().capture(*args, **kwargs) | {"a": {"w": weights, "same memory": weights[:10]}}

    saver.save(Large(one_rank()), TrainState(step=3))
    assert names(tmp_path) == []
    assert (
        "it needs 0.005 GB, and 0.002 GB are free on the disk of" in told[0] and "checkpoint.keep" in told[0]
    )
    saver.save(FakeEngine(one_rank()), TrainState(step=4))
    saver.wait()


@pytest.mark.parametrize("obstacle", ["a file in the folder's place", "capture"])
def test_a_folder_that_cannot_be_written_is_a_failure_like_any_other(
    tmp_path: Path, told: list[str], obstacle: str
) -> None:
    class NoMemory(FakeEngine):
        def capture(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            raise MemoryError("host memory is used up")

    folder = tmp_path / "checkpoints"
    engine = FakeEngine(one_rank()) if obstacle != "capture" else NoMemory(one_rank())
    if obstacle != "capture":
        folder.write_text("not a folder")
    saver = make_saver(folder, one_rank(), told, max_failures=1)
    saver.save(engine, TrainState(step=1))
    assert "could not be begun" in told[0]
    with pytest.raises(CheckpointError, match="failure 2 in a row"):
        saver.save(engine, TrainState(step=2))


def test_the_same_state_is_not_saved_twice_and_another_of_the_same_step_replaces_it(
    tmp_path: Path, told: list[str]
) -> None:
    saver = make_saver(tmp_path, one_rank(), told)
    for tokens in (5, 5, 6):
        saver.save(FakeEngine(one_rank()), TrainState(step=3, tokens=tokens))
        saver.wait()
    assert len(told) == 2 and names(tmp_path) == ["step_000003"]
    assert read_manifest(tmp_path / "step_000003").tokens == 6


def test_saving_over_a_broken_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    (tmp_path / "step_000005" / "stray").write_text("x")
    (tmp_path / "step_000005" / "manifest.json").unlink()
    save_steps(tmp_path, 5)
    assert names(tmp_path) == ["step_000005"]
    read_manifest(tmp_path / "step_000005")


def test_left_overs_of_a_kill_are_removed_and_nothing_else(tmp_path: Path) -> None:
    left = ["step_000003.partial", "step_000004.replaced.partial"]
    others = ["step_000001.abandoned", "mine.partial", "step_3.partial"]
    for name in left + others:
        (tmp_path / name).mkdir()
    make_saver(tmp_path, one_rank()).prepare()
    assert names(tmp_path) == sorted(others)
    save_steps(tmp_path, 5)
    assert names(tmp_path) == sorted([*others, "step_000005"])


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(save_module, "delete_old", refuse)
    saver = make_saver(tmp_path, one_rank(), told)
    saver.save(FakeEngine(one_rank()), TrainState(step=1))
    saver.wait()
    assert "could not be deleted: [Errno 13]" in told[-1] and names(tmp_path) == ["step_000001"]


def test_the_stall_stands_in_the_record_of_the_step_behind_it() -> None:
    waits = iter([0.0, 1.5])
    hook, records = StallHook(lambda: next(waits)), [{}, {}]
    for record in records:
        hook.after_step(TrainState(), record)
    assert records == [{"checkpoint_stall_s": 0.0}, {"checkpoint_stall_s": 1.5}]


def test_the_line_of_a_save_has_its_size_time_and_rate(tmp_path: Path, told: list[str]) -> None:
    saver = make_saver(tmp_path, one_rank(), told)
    saver.save(FakeEngine(one_rank()), TrainState(step=5))
    saver.wait()
    assert told[0].startswith(f"checkpoint of step 5: {tmp_path / 'step_000005'}, 0.000 GB in ")
    assert "GB/s), the steps waited" in told[0]


def test_a_record_that_is_half_written_is_not_read(tmp_path: Path) -> None:
    cancelled = threading.Event()
    (tmp_path / ".rank_00000.unfinished").write_text("{")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(writer.await_records(tmp_path, 1, cancelled)))
    thread.start()
    writer.leave_record(tmp_path, 0, {"a": (3, "c")})
    thread.join(20)
    assert found == [{"a": (3, "c")}] and os.listdir(tmp_path) == []
