"""Host memory in a file, for what the host cannot hold.

Plain positioned reads and writes in one background thread, past the page cache where the file system allows it. Pieces of
16 MiB keep a disk busy without queues of small requests, and go to or come from the file while other layers are computed.
DeepSpeed's asynchronous I/O would do the same after minutes of compiling, and only where libaio is installed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stack.config.kept import PAGE
from stack.errors import MemoryShortage


@dataclass(frozen=True)
class Place:
    """A part of the file, in bytes."""

    start: int
    end: int


class SpillFile:
    """A file of this process alone. It has no name once it is open, so a run that is killed leaves nothing behind."""

    def __init__(self, folder: str | Path):
        """folder: on a local disk. Raises MemoryShortage if no file can be made there."""
        self.folder = Path(folder).expanduser()
        try:
            handle, name = tempfile.mkstemp(prefix="kept-activations-", dir=self.folder)
        except OSError as error:
            raise MemoryShortage(
                f"memory.spill_folder={self.folder}: {error.strerror}. Fix: an existing folder on a local disk"
            ) from error
        self._file = _unbuffered(name, handle)
        os.unlink(name)
        self._thread = ThreadPoolExecutor(1, "spill")
        self._end = self._places = 0

    def write(self, slabs: Sequence[Tensor], ready: torch.cuda.Event | None) -> tuple[Place, Future[None]]:
        """slabs: bytes, unchanged until the future is done. ready: when their content is there.

        The future raises MemoryShortage if the disk is full.
        """
        place = Place(self._end, self._end + sum(slab.numel() for slab in slabs))
        self._end, self._places = place.end, self._places + 1
        return place, self._thread.submit(self._move, os.pwrite, slabs, place, ready)

    def read(self, place: Place, slabs: Sequence[Tensor], ready: torch.cuda.Event | None) -> Future[None]:
        """slabs: as many bytes as `place` has. ready: when they may be overwritten."""
        return self._thread.submit(self._move, _read_into, slabs, place, ready)

    def free(self) -> None:
        """The file is written anew once nothing in it is wanted, which is at the end of every backward."""
        self._places -= 1
        if self._places == 0:
            self._end = 0

    def _move(
        self,
        call: Callable[[int, memoryview, int], int],
        slabs: Sequence[Tensor],
        place: Place,
        ready: torch.cuda.Event | None,
    ) -> None:
        if ready is not None:
            ready.synchronize()
        at = place.start
        for slab in slabs:
            rest = slab.numpy().data
            while rest:
                try:
                    moved = call(self._file, rest, at)
                except OSError as error:
                    raise MemoryShortage(self._full(error, place.end)) from error
                if not moved:
                    raise MemoryShortage(f"memory.spill_folder={self.folder}: the file ends at {at} bytes")
                rest, at = rest[moved:], at + moved

    def _full(self, error: OSError, end: int) -> str:
        free = shutil.disk_usage(self.folder).free
        return (
            f"memory.spill_folder={self.folder}: {error.strerror}, where the kept activations of this rank take {end} bytes "
            f"and {free} are free. Fix: a folder with more room, or a larger memory.host_gib"
        )


def _read_into(file: int, rest: memoryview, at: int) -> int:
    return os.preadv(file, [rest], at)


def _unbuffered(name: str, handle: int) -> int:
    """The file past the page cache, whose pages would take the memory that is to be saved; as it is where that fails."""
    try:
        direct = os.open(name, os.O_RDWR | os.O_DIRECT)
    except (AttributeError, OSError):  # not Linux, or a file system without it
        return handle
    try:
        os.pwrite(direct, aligned_bytes(PAGE).numpy().data, 0)
    except OSError:
        os.close(direct)
        return handle
    os.close(handle)
    return direct


def aligned_bytes(num_bytes: int) -> Tensor:
    """Host memory that starts at a multiple of PAGE, [num_bytes]."""
    room = torch.empty(num_bytes + PAGE, dtype=torch.uint8)
    first = -room.data_ptr() % PAGE
    return room[first : first + num_bytes]
