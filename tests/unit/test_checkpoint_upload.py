"""Copies elsewhere: complete or absent, behind the steps, tried again, never the end of a run; against a local S3 server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import stack.checkpoint.upload as upload_module
from stack.checkpoint.manifest import FILE_NAME, read_manifest, verify_files
from stack.checkpoint.publish import Origin
from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState
from stack.checkpoint.upload import Uploader, download, upload
from stack.config.checks import check
from stack.config.schema import RunConfig
from stack.config.schema_checkpoint import CheckpointConfig
from stack.errors import CheckpointError
from tests.unit.saving_rig import LAYOUT, make_saver, names, save_steps
from tests.unit.train_fakes import FakeEngine, one_rank


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The environment under which s3fs talks to a server in this process."""
    from moto.server import ThreadedMotoServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    yield {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/elsewhere"
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    for key, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(key, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    bucket = tmp_path.name.replace("_", "-").lower()[:60].strip("-")
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/runs/one"


@pytest.fixture
def told() -> list[str]:
    return []


def far(address: str) -> list[str]:
    fs, path = upload_module.open_address(address)
    return sorted(
        name.removeprefix(path.lstrip("/") + "/").removeprefix(path + "/") for name in fs.find(path)
    )


def test_each_published_checkpoint_is_copied_and_comes_back_whole(
    tmp_path: Path, told: list[str], address: str
) -> None:
    saver = make_saver(tmp_path / "own", one_rank(), told, keep=1, upload=address + "/")
    for step in (3, 5):
        saver.save(FakeEngine(one_rank()), TrainState(step=step))
        saver.close()  # until it is copied
    assert names(tmp_path / "own") == ["step_000005"]
    files = [*read_manifest(tmp_path / "own" / "step_000005").files, FILE_NAME]
    assert far(address) == sorted(f"mine/step_{step:06d}/{file}" for step in (3, 5) for file in files)
    assert f"step_000005 is copied to {address}/mine/step_000005" in told

    back = download(f"{address}/mine/step_000005", tmp_path / "back" / "step_000005")
    verify_files(back, read_manifest(back))
    assert read_manifest(back) == read_manifest(tmp_path / "own" / "step_000005")
    assert names(tmp_path / "back") == ["step_000005"]


def test_runs_with_one_address_keep_their_own_copies(tmp_path: Path) -> None:
    address = f"memory://{tmp_path.name}/shared"
    for run in ("one", "two"):
        policy = CheckpointConfig(upload=address)
        saver = Saver(tmp_path / run, one_rank(), Origin(run, LAYOUT, 12), policy, print)
        saver.save(FakeEngine(one_rank()), TrainState(step=3))
        saver.close()
    for run in ("one", "two"):
        back = download(f"{address}/{run}/step_000003", tmp_path / "back" / run / "step_000003")
        assert read_manifest(back).run == run


def test_a_copy_without_its_manifest_is_none_and_a_damaged_one_is_refused(
    tmp_path: Path, address: str
) -> None:
    save_steps(tmp_path, 3)
    upload(tmp_path / "step_000003", f"{address}/step_000003", set(), print)
    fs, path = upload_module.open_address(address)
    fs.pipe_file(f"{path}/step_000003/rng_rank_00000.pt", b"something else")
    with pytest.raises(CheckpointError, match=r"rng_rank_00000\.pt"):
        download(f"{address}/step_000003", tmp_path / "back")
    fs.rm_file(f"{path}/step_000003/{FILE_NAME}")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        download(f"{address}/step_000003", tmp_path / "back")
    with pytest.raises(CheckpointError, match="not overwritten"):
        download(f"{address}/step_000003", tmp_path)
    assert not (tmp_path / "back").exists()


class Unreliable:
    """Stands before a file system; the first `failures` files do not get through."""

    def __init__(self, fs: Any, failures: int):
        self._fs, self.failures, self.put = fs, failures, []

    def put_file(self, here: str, there: str) -> None:
        if self.failures:
            self.failures -= 1
            raise TimeoutError("no answer")
        self.put.append(Path(there).name)
        self._fs.put_file(here, there)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def through(monkeypatch: pytest.MonkeyPatch, failures: int) -> Unreliable:
    real = upload_module.open_address
    unreliable = Unreliable(real("memory://")[0], failures)
    monkeypatch.setattr(upload_module, "open_address", lambda address: (unreliable, real(address)[1]))
    return unreliable


def test_a_failed_copy_is_said_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    save_steps(tmp_path, 3)
    fs = through(monkeypatch, failures=2)
    uploader = Uploader(f"memory://{tmp_path.name}/a", told.append, pause_s=0.01)
    uploader.put(tmp_path / "step_000003")
    uploader.wait(20)
    assert not uploader.busy()
    assert [line.split(";")[-1] for line in told[:2]] == [" attempt 2 of 5 in 0 s", " attempt 3 of 5 in 0 s"]
    assert "TimeoutError: no answer" in told[0] and "is copied" in told[2]
    assert fs.put[-1] == FILE_NAME and len(fs.put) == len(set(fs.put)), "no file twice, the manifest last"


def test_a_store_that_stays_away_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    fs = through(monkeypatch, failures=10**6)
    saver = make_saver(tmp_path, one_rank(), told, upload=f"memory://{tmp_path.name}/b")
    assert saver._uploader is not None
    saver._uploader._pause_s = 0.01
    saver.save(FakeEngine(one_rank()), TrainState(step=3))
    saver.close()
    assert "is not copied" in told[-1] and f"It is complete in {tmp_path / 'step_000003'}" in told[-1]
    assert fs.put == []


def test_the_checkpoint_that_is_being_copied_is_not_deleted_and_those_between_are_left_out_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    begun, go_on, copied = threading.Event(), threading.Event(), []

    def slow(folder: Path, target: str, done: set[str], note: Any) -> None:
        begun.set()
        assert go_on.wait(20)
        copied.append((folder.name, folder.is_dir()))

    monkeypatch.setattr(upload_module, "upload", slow)
    saver: Saver = make_saver(tmp_path, one_rank(), told, keep=1, upload="memory://c")
    for step in (1, 2, 3):
        saver.save(FakeEngine(one_rank()), TrainState(step=step))
        saver.wait()
        assert begun.wait(20)
    assert names(tmp_path) == ["step_000001", "step_000003"]
    assert saver._uploader is not None
    saver._uploader.wait(0)
    assert told[-1].startswith("still copying")
    go_on.set()
    saver.close()
    assert copied == [("step_000001", True), ("step_000003", True)]
    assert any("step_000002 is not copied" in line for line in told)


def test_another_checkpoint_of_the_same_step_takes_the_old_manifest_away_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path / "one", 3)
    save_steps(tmp_path / "two", 3, losses={3: 1.0})
    fs, address = through(monkeypatch, failures=0), f"memory://{tmp_path.name}/d"
    upload(tmp_path / "one" / "step_000003", address, set(), print)
    sent = len(fs.put)
    upload(tmp_path / "one" / "step_000003", address, set(), print)
    assert len(fs.put) == sent, "the same one is there already"
    fs.failures = 1
    with pytest.raises(TimeoutError):
        upload(tmp_path / "two" / "step_000003", address, set(), print)
    assert FILE_NAME not in far(address)


def test_a_stop_does_not_wait_for_copies_and_the_next_start_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    go_on, address = threading.Event(), f"memory://{tmp_path.name}/e"
    real = upload_module.upload

    def slow(*args: Any) -> None:
        assert go_on.wait(20)
        raise TimeoutError("the process is gone")

    monkeypatch.setattr(upload_module, "upload", slow)
    saver = make_saver(tmp_path, one_rank(), told, upload=address)
    saver.save(FakeEngine(one_rank()), TrainState(step=3))
    saver.put_off_copies()
    saver.close()
    assert [line for line in told if "cop" in line] == []
    monkeypatch.setattr(upload_module, "upload", real)
    again = make_saver(tmp_path, one_rank(), told, upload=address)
    again.prepare()
    again.close()
    assert f"mine/step_000003/{FILE_NAME}" in far(address)
    go_on.set()


@pytest.mark.parametrize("given, said", [("nosuch://a/b", "nosuch"), ("/just/a/folder", "file:///FOLDER")])
def test_an_address_that_cannot_be_opened_is_a_fault_of_the_configuration(given: str, said: str) -> None:
    cfg = RunConfig(checkpoint=CheckpointConfig(upload=given))
    faults = [fault for fault in check(cfg) if fault.key == "checkpoint.upload"]
    assert len(faults) == 1 and said in str(faults[0])
    cfg = RunConfig(checkpoint=CheckpointConfig(upload="memory://a"))
    assert not [fault for fault in check(cfg) if fault.key == "checkpoint.upload"]
