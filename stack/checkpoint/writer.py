"""Files on their way to the disk: written, checksummed and read back on a thread of their own, while the steps go on.

Each rank writes its own files into the `.partial` folder and then leaves a record of them there. Rank 0 waits for the
records of all ranks and publishes. The ranks need no collectives for this, which only their main threads may make.
"""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from stack.checkpoint.manifest import CHUNK_BYTES, hash_file

LOOK_S = 0.05  # between looks for the records of other ranks


class Cancelled(Exception):
    """Another rank failed: this save will not be published."""


@dataclass(frozen=True)
class Progress:
    """Where a rank is with its part of a save."""

    stage: str
    """`writing`, `written`, `published` (rank 0) or `failed`."""
    error: str = ""


class Flight:
    """One save of one rank, from the copy in memory to the disk."""

    def __init__(
        self,
        part: Path,
        rank: int,
        contents: dict[str, Any],
        publish: Callable[[Flight], None] | None = None,
    ):
        """part: the `.partial` folder. contents: path inside it -> what `torch.save` is to write there. publish: rank 0's
        work once its own files are written."""
        self.part, self.rank = part, rank
        self.begun = time.monotonic()
        self.progress = Progress("writing")
        self.cancelled, self.done = threading.Event(), threading.Event()
        self._contents, self._publish = contents, publish
        # A daemon: a disk that never answers must not keep a process alive that wants to end.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            files = {
                name: write_file(self.part / name, content, self.cancelled)
                for name, content in self._contents.items()
            }
            if self.cancelled.is_set():
                raise Cancelled
            leave_record(self.part, self.rank, files)
            if self._publish is None:
                self.progress = Progress("written")
            else:
                self._publish(self)
                self.progress = Progress("published")
        except Cancelled:
            self.progress = Progress("failed")
        except BaseException as error:  # noqa: BLE001  whatever it is, the main threads of all ranks have to hear of it
            self.progress = Progress("failed", f"{type(error).__name__}: {error}")
        finally:
            self._contents = {}
            self.done.set()

    def cancel(self) -> None:
        """End at the next chunk, publish nothing."""
        self.cancelled.set()

    def ended(self, within_s: float) -> bool:
        """Whether the thread is through, waiting for it so long."""
        self._thread.join(within_s)
        return not self._thread.is_alive()


class ChecksummedFile(io.RawIOBase):
    """A new file that takes its checksum from the bytes as they pass."""

    def __init__(self, path: Path, cancelled: threading.Event):
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  closed by close()
        self._cancelled, self._digest = cancelled, xxhash.xxh3_128()
        self.error: BaseException | None = None
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        try:
            for begin in range(0, len(view), CHUNK_BYTES):
                if self._cancelled.is_set():
                    raise Cancelled
                chunk = view[begin : begin + CHUNK_BYTES]
                self._digest.update(chunk)
                write_chunk(self._file.fileno(), chunk)
        except BaseException as error:
            # torch goes on to the end of its archive, and what it raises then says less.
            self.error = self.error or error
            raise
        self.size += len(view)
        return len(view)

    def finish(self) -> str:
        """Has the disk hold every byte; returns the checksum of what was written."""
        os.fsync(self._file.fileno())
        # Let go of the cached pages, so that reading back asks the disk.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


def write_chunk(descriptor: int, chunk: memoryview) -> None:
    """All of `chunk`; the system may take less than it is given at a time."""
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def write_file(path: Path, content: Any, cancelled: threading.Event) -> tuple[int, str]:
    """Write `content` by torch.save and read it back; size in bytes and checksum.

    Raises OSError if the disk does not take it or does not give the same bytes back, Cancelled if told so.
    """
    with ChecksummedFile(path, cancelled) as file:
        try:
            torch.save(content, cast(IO[bytes], file))
        except Exception as error:  # noqa: BLE001  what torch makes of an error in its callback
            raise file.error or error from None
        checksum = file.finish()
    if (back := hash_file(path)) != checksum:
        raise OSError(f"{path} reads back with checksum {back}, not the {checksum} that was written")
    return file.size, checksum


def record_name(rank: int) -> str:
    """Hidden, as it belongs to the save and not to the checkpoint."""
    return f".rank_{rank:05d}.json"


def leave_record(part: Path, rank: int, files: dict[str, tuple[int, str]]) -> None:
    """Say that all files of this rank are on the disk: path -> (bytes, checksum)."""
    path = part / record_name(rank)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(files), encoding="utf-8")
    os.replace(unfinished, path)


def await_records(part: Path, world: int, cancelled: threading.Event) -> dict[str, tuple[int, str]]:
    """The files of all ranks, once each has left its record; the records are removed. Raises Cancelled if told so."""
    paths = [part / record_name(rank) for rank in range(world)]
    while not all(path.exists() for path in paths):
        if cancelled.wait(LOOK_S):
            raise Cancelled
    files: dict[str, tuple[int, str]] = {}
    for path in paths:
        for name, (size, checksum) in json.loads(path.read_text(encoding="utf-8")).items():
            files[name] = (size, checksum)
    for path in paths:
        path.unlink()
    return files
