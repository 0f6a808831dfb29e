"""The lock of a run folder: holders that live, died, or are on another machine."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stack.errors import LaunchError
from stack.train import run_lock
from stack.train.run_lock import RunLock, take_lock

HOLD = """
import sys, time
from pathlib import Path
from stack.train.run_lock import take_lock
lock = take_lock(Path(sys.argv[1]), print)
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.5)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)


def take(path: Path) -> tuple[RunLock, list[str]]:
    told: list[str] = []
    return take_lock(path, told.append), told


def record(path: Path, **changes: Any) -> None:
    """As another machine would have left it."""
    path.write_text(json.dumps({"host": "elsewhere", "process": 7, "since": "then", "beat": 3} | changes))


def test_second_job_is_refused_with_who_holds_it_and_a_killed_holder_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "taken\n"
        with pytest.raises(LaunchError) as caught:
            take(path)
        assert f"in use by process {other.pid} on {socket.gethostname()} since 20" in str(caught.value)
        other.kill()
        other.wait()
    lock, told = take(path)
    assert told == []
    lock.close()
    assert path.read_bytes() == b""


def test_closed_lock_can_be_taken_at_once_and_open_one_beats(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock, _ = take(path)
    first = json.loads(path.read_text())
    limit = time.monotonic() + 30
    while json.loads(path.read_text())["beat"] == first["beat"]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert first["process"] == os.getpid() and first["host"] == socket.gethostname()
    lock.close()
    take(path)[0].close()


def test_silent_holder_on_another_machine_is_taken_over_with_a_word(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    record(path)
    lock, told = take(path)
    assert len(told) == 2
    assert "process 7 on elsewhere since then" in told[0] and "taking over" in told[1]
    assert json.loads(path.read_text())["host"] == socket.gethostname()
    lock.close()


def test_silent_holder_whose_kernel_lock_a_file_server_keeps_is_taken_over_too(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    record(path)
    with open(path) as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        lock, told = take(path)
        assert "taking over" in told[-1]
    with pytest.raises(LaunchError):
        take(path)
    lock.close()


def test_holder_that_beats_on_another_machine_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE_S", 30.0)
    path, ended = tmp_path / "lock", threading.Event()
    record(path)

    def beat() -> None:
        count = 3
        while not ended.wait(0.05):
            count += 1
            part = path.with_name("part")
            record(part, beat=count)
            os.replace(part, path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LaunchError, match="in use by process 7 on elsewhere"):
            take(path)
    finally:
        ended.set()
        thread.join()


def test_holder_that_closes_meanwhile_leaves_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    record(path)
    timer = threading.Timer(0.1, lambda: path.write_text(""))
    timer.start()
    lock, told = take(path)
    assert len(told) == 1
    lock.close()
    timer.join()


def test_record_of_an_older_version_is_no_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("process 12 on here")
    take(path)[0].close()


def test_forked_worker_does_not_keep_the_lock_of_a_dead_run(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    forking = HOLD.replace(
        'print("taken", flush=True)',
        """
import os
reading, writing = os.pipe()
worker = os.fork()
if worker == 0:
    os.write(writing, b"1")
    time.sleep(60)
    os._exit(0)
os.read(reading, 1)
print(worker, flush=True)""",
    )
    command = [sys.executable, "-c", forking, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        worker = int(other.stdout.readline())
        other.kill()
        other.wait()
        try:
            take(path)[0].close()
        finally:
            os.kill(worker, 9)
