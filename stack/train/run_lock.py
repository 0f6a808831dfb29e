"""One job at a time in a run folder, also where the folder is shared by many machines and its holder may have died.

`lock` holds who has the folder: JSON, written anew every BEAT_S. On one machine the kernel's lock on that file says whether
the holder lives. Between machines it may not, since some network file systems keep such locks to each machine, and others
keep those of a dead machine: there the holder lives if its beats go on.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stack.errors import LaunchError

BEAT_S = 10.0
RECORD_BYTES = 511
PATIENCE_S = 60.0  # how long a beat is waited for: some file systems show a change only after a minute


class RunLock:
    """The folder is this process's from `take_lock` until `close` or the end of the process."""

    def __init__(self, path: Path, descriptor: int):
        self._path, self._descriptor = path, descriptor
        self._record = {"host": socket.gethostname(), "process": os.getpid(), "since": _now()}
        self._closed = threading.Event()
        self._beat(0)
        # A forked worker that still had the file open would keep the lock of a dead run.
        os.register_at_fork(after_in_child=self._after_fork)
        self._thread = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the folder; leaves an empty file."""
        self._closed.set()
        self._thread.join()
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _keep_beating(self) -> None:
        count = 0
        while not self._closed.wait(BEAT_S):
            count += 1
            self._beat(count)

    def _beat(self, count: int) -> None:
        text = json.dumps({**self._record, "beat": count, "last": _now()})
        # Of one length and in one write: a reader must never find an empty file, which means a free folder.
        os.pwrite(self._descriptor, text.ljust(RECORD_BYTES).encode(), 0)

    def _after_fork(self) -> None:
        if not self._closed.is_set():
            os.close(self._descriptor)


def take_lock(path: Path, tell: Callable[[str], None]) -> RunLock:
    """Lock the run folder that `path` lies in. Raises LaunchError, naming the holder, if another job has it."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        locked = False
    except OSError as error:  # some network file systems have no locks: the beats are all there is
        tell(f"warning: {path.parent} cannot be locked ({error}): its record alone keeps a second run out")
        locked = True
    holder = _read(path)
    elsewhere = bool(holder) and holder.get("host") != socket.gethostname()
    if not elsewhere and not locked:
        raise _in_use(path, holder)
    if elsewhere:
        _outwait(path, holder, tell)
        if not locked:
            # The file system still keeps the dead machine's lock on this file, so the folder gets another one.
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return take_lock(path, tell)
    return RunLock(path, descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _outwait(path: Path, holder: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Returns when the holder, on another machine, has let PATIENCE_S pass without a beat."""
    tell(
        f"the run folder {path.parent} was left by {_describe(holder)}: waiting up to {PATIENCE_S:.0f} s for a sign of life"
    )
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        time.sleep(min(1.0, PATIENCE_S / 10))
        now = _read(path)
        if not now:  # it has just closed
            return
        if now != holder:
            raise _in_use(path, now)
    tell(f"no sign of life from {_describe(holder)}: taking over {path.parent}")


def _in_use(path: Path, holder: dict[str, Any]) -> LaunchError:
    who = _describe(holder) if holder else "another process"
    return LaunchError(
        f"the run folder {path.parent} is in use by {who}. Fix: wait for that run to end, or give this one another name: "
        "name=NEW_NAME"
    )


def _describe(holder: dict[str, Any]) -> str:
    return f"process {holder.get('process')} on {holder.get('host')} since {holder.get('since')}"


def _read(path: Path) -> dict[str, Any]:
    """The record; {} if the folder is free."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):  # an empty file, or one of a version that wrote no record
        return {}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S%z")
