"""Save checkpoints so that a half-written one can never be taken for a whole one, while the steps go on.

A save goes through these stages; the first three are collective and are all that the loop waits for:

1. the save before it is over (published or failed): at most one is under way, so a slow disk slows the loop down
2. rank 0 makes the `.partial` folder; every rank copies its states into host memory
3. the bytes of all ranks fit on the disk
4. every rank writes, checksums and reads back its files on a thread of its own (`writer.py`)
5. rank 0's thread checks the set of files, writes the manifest, renames the folder (`publish.py`), deletes old ones

A failure anywhere publishes nothing and deletes nothing. All ranks hear of it at the next step.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from stack.checkpoint.manifest import rng_name, step_folder_name, step_folders
from stack.checkpoint.publish import Origin, publish, remove_tree
from stack.checkpoint.retention import delete_old
from stack.checkpoint.state import CLIENT_KEY, TrainState, random_state
from stack.checkpoint.upload import Uploader
from stack.checkpoint.writer import Flight, Progress, await_records
from stack.config.schema_checkpoint import CheckpointConfig
from stack.dist.topology import Topology
from stack.engine.capture import tensor_bytes
from stack.errors import CheckpointError

BEAT_S = 0.05  # between looks at a save that the loop waits for
NEWS_S = 60.0  # between lines about a save that takes long
CANCEL_S = (
    10.0  # how long a failed save may take to end its threads; later, its files are left for the next one
)
SHARED_S = 30.0  # within which a folder that one node makes is seen on all
NOT_SHARED = "the folder that rank 0 made is not there: let `out` be a folder that all nodes share"
PARTIAL = re.compile(r"step_\d{6,}(\.replaced)?\.partial")
HEADERS_BYTES = 2**20
"""Of each rank, for what is not tensors in its files: names, shapes, random states."""


class SavingEngine(Protocol):
    """What saving needs of an engine."""

    def capture(
        self, folder: Path, tag: str, client_state: dict[str, Any], to_host: bool
    ) -> dict[str, Any]: ...


class Saver:
    """Saves checkpoints of one run below `folder`, and deletes old ones."""

    def __init__(
        self,
        folder: Path,
        topology: Topology,
        origin: Origin,
        policy: CheckpointConfig,
        tell: Callable[[str], None] = print,
    ):
        """tell: takes a line for the person at the console, on rank 0, from any thread."""
        self.folder, self.topology, self.origin = folder, topology, origin
        self.policy, self.tell = policy, tell
        self._uploader: Uploader | None = None
        if policy.upload and topology.is_main:
            # A folder for each run, so that runs with one address never take each other's copies for their own.
            self._uploader = Uploader(f"{policy.upload.rstrip('/')}/{origin.run}", tell)
        self._flight: Flight | None = None
        self._state: dict[str, Any] = {}  # of the newest save
        self._error = ""  # of the newest save
        self._failures = 0  # in a row
        self._stall_s = 0.0
        self._copies_put_off = False
        self._left: set[str] = set()  # names that could not be removed, and were told

    def save(self, engine: SavingEngine, state: TrainState, metrics: dict[str, float] | None = None) -> None:
        """Collective. Returns once the steps may go on; `step_NNNNNN` appears when it is complete. The same state again, at
        a stop for instance, is not saved twice.

        metrics: of this very step, for `keep_best`. Raises CheckpointError once more than `max_failures` saves in a row
        have failed.
        """
        if state.to_dict() == self._state and not self._error:
            return
        begin = time.monotonic()
        try:
            self._settle()
            self._start(engine, state, metrics or {}, begin)
            if not self.policy.asynchronous:
                self._settle()
        finally:
            self._stall_s += time.monotonic() - begin

    def poll(self) -> None:
        """Collective, once a step, and quick: take note of a save that was published or failed. Raises like `save`."""
        if self._flight is None:
            return
        ranks: list[Progress] = self.topology.gather_objects(self._flight.progress)
        failed = [rank for rank, progress in enumerate(ranks) if progress.stage == "failed"]
        if failed:
            flight, self._flight = self._flight, None
            self._discard(flight)
            # One that was only called off has nothing to say.
            causes = [f"rank {rank}: {ranks[rank].error}" for rank in failed if ranks[rank].error]
            self._fail(f"the checkpoint {flight.part} could not be written ({'; '.join(causes)})")
        elif ranks[0].stage == "published":
            self._flight, self._failures, self._error = None, 0, ""

    def wait(self) -> None:
        """Collective. Returns once nothing is under way; raises CheckpointError if the newest save failed."""
        self._settle()
        if self._error:
            raise CheckpointError(self._error)

    def close(self) -> None:
        """Collective, at the end of the run: `wait`, then until copies elsewhere are made, given up or put off."""
        self.wait()
        if self.policy.upload and not self._copies_put_off:
            while self.topology.broadcast_object(self._uploader is not None and self._uploader.busy()):
                if self._uploader is not None:
                    self._uploader.wait(NEWS_S)

    def put_off_copies(self) -> None:
        """For a run that has to stop soon: `close` does not wait for copies elsewhere. The next start makes them."""
        self._copies_put_off = True

    def take_stall_s(self) -> float:
        """Seconds that the steps waited for checkpoints since the last call."""
        seconds, self._stall_s = self._stall_s, 0.0
        return seconds

    def prepare(self) -> None:
        """For rank 0, before the first save: left-overs are removed, and a copy that an earlier start did not get to is
        made. Raises OSError."""
        self._clear()
        newest = next(iter(step_folders(self.folder)), None)
        if self._uploader is not None and newest is not None:
            self._uploader.put(newest)

    def _clear(self) -> None:
        """Remove what saves and deletions that were cut short have left; nothing is under way now."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if PARTIAL.fullmatch(path.name):
                    try:
                        remove_tree(path)
                    except OSError as error:
                        if path.name not in self._left:
                            self.tell(f"warning: {path} is left over and could not be removed: {error}")
                        self._left.add(path.name)

    def _start(
        self, engine: SavingEngine, state: TrainState, metrics: dict[str, float], begin: float
    ) -> None:
        self._state = state.to_dict()
        part = self.folder / f"{step_folder_name(state.step)}.partial"
        free, error = self.topology.broadcast_object(self._make_room(part) if self.topology.is_main else None)
        contents: dict[str, Any] = {}
        # Ranks agree after each part: one that left alone would leave the others waiting in the next.
        if not error:
            _, error = self._agree(0, "" if _appears(part) else NOT_SHARED)
        if not error:
            contents, error = self._capture(engine, part)
            needed, error = self._agree(tensor_bytes(contents) + HEADERS_BYTES, error)
            if not error and needed > free:
                error = f"it needs {needed / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free on the disk of {self.folder}"
        if error:
            self._remove(part)
            self._fail(f"the checkpoint {part} could not be begun ({error})")
            return
        finish = partial(self._finish, TrainState.from_dict(self._state), metrics, time.monotonic() - begin)
        publishing = finish if self.topology.is_main else None
        self._flight = Flight(part, self.topology.rank, contents, publishing)

    def _make_room(self, part: Path) -> tuple[int, str]:
        """Free bytes on the disk, and what went wrong."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear()
            part.mkdir()
            return shutil.disk_usage(self.folder).free, ""
        except OSError as error:
            return 0, str(error)

    def _agree(self, size: int, error: str) -> tuple[int, str]:
        """The sum of the sizes, and the errors of all ranks."""
        reports = self.topology.gather_objects((size, error))
        errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(reports) if text]
        return sum(size for size, _ in reports), "; ".join(errors)

    def _capture(self, engine: SavingEngine, part: Path) -> tuple[dict[str, Any], str]:
        client_state = {CLIENT_KEY: self._state}
        try:
            contents = engine.capture(part.parent, part.name, client_state, to_host=self.policy.asynchronous)
        except (OSError, RuntimeError, MemoryError) as error:  # of missing device memory, torch: RuntimeError
            fix = (
                "; checkpoint.asynchronous=false needs no copy in host memory"
                if self.policy.asynchronous
                else ""
            )
            return {}, f"{type(error).__name__}: {error}{fix}"
        contents[rng_name(self.topology.rank)] = random_state(self.topology.device)
        return contents, ""

    def _finish(self, state: TrainState, metrics: dict[str, float], stall_s: float, flight: Flight) -> None:
        files = await_records(flight.part, self.topology.world, flight.cancelled)
        target = publish(flight.part, self.origin.describe(state, metrics, files))
        seconds = time.monotonic() - flight.begun
        size = sum(size for size, _ in files.values()) / 1e9
        self.tell(
            f"checkpoint of step {state.step}: {target}, {size:.3f} GB in {seconds:.1f} s ({size / seconds:.2f} GB/s), "
            f"the steps waited {stall_s:.2f} s"
        )
        if self._uploader is not None:
            self._uploader.put(target)
        try:
            spare = self._uploader.current if self._uploader is not None else None
            delete_old(self.folder, self.origin.run, state.step, self.policy, spare)
        except OSError as error:
            self.tell(f"warning: an old checkpoint could not be deleted: {error}")

    def _settle(self) -> None:
        news = time.monotonic() + NEWS_S
        while self._flight is not None:
            self._flight.done.wait(BEAT_S)
            if self.topology.is_main and time.monotonic() > news:
                seconds = time.monotonic() - self._flight.begun
                self.tell(f"still writing {self._flight.part} ({seconds:.0f} s): the steps wait for the disk")
                news += NEWS_S
            self.poll()

    def _discard(self, flight: Flight) -> None:
        """End the threads of a failed save and remove its files, which may be what fills the disk."""
        flight.cancel()
        ended = all(self.topology.gather_objects(flight.ended(CANCEL_S)))
        if ended:
            self._remove(flight.part)

    def _remove(self, part: Path) -> None:
        if self.topology.is_main:
            # What cannot be removed now is tried again at the next save.
            shutil.rmtree(part, ignore_errors=True)

    def _fail(self, cause: str) -> None:
        self._error = (
            f"{cause}. Nothing was published, and older checkpoints are as they were. Fix: see that the disk has room, is "
            "mounted and can be written; fewer checkpoints are kept with checkpoint.keep, another disk is taken with `out`"
        )
        self._failures += 1
        limit = self.policy.max_failures
        if self._failures > limit:
            raise CheckpointError(
                f"{self._error}. This was failure {self._failures} in a row, checkpoint.max_failures={limit}"
            )
        if self.topology.is_main:
            self.tell(
                f"warning: {self._error}. Training goes on; this was failure {self._failures} in a row, the run stops after "
                f"more than {limit} (checkpoint.max_failures)"
            )


def _appears(folder: Path) -> bool:
    """Whether a folder that rank 0 made is seen here too; network disks may be slow to tell."""
    limit = time.monotonic() + SHARED_S
    while not folder.is_dir():
        if time.monotonic() > limit:
            return False
        time.sleep(BEAT_S)
    return True
