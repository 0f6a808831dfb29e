"""Two ways off the straight course: a stop that loses nothing, and going back to the newest checkpoint."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import psutil

from stack.checkpoint.find import Checkpoint, inspect
from stack.checkpoint.load import load_checkpoint, set_aside_newer, way_of
from stack.checkpoint.manifest import read_manifest, step_folder_name, step_folders
from stack.checkpoint.state import TrainState
from stack.dist.agree import on_main
from stack.dist.env import RankEnv
from stack.dist.topology import Topology
from stack.errors import CheckpointError, DataError, RollbackError
from stack.train.folder import write_whole


class Saver(Protocol):
    """What a stop needs of `stack.checkpoint.save.Saver`."""

    origin: Any

    def save(self, engine: Any, state: TrainState) -> Any: ...
    def wait(self) -> Any: ...
    def put_off_copies(self) -> None: ...


@dataclass
class Keeper:
    """The checkpoints of a run, as a stop and a way back need them. All methods are collective."""

    folder: Path
    saver: Saver
    engine: Any
    loader: Any
    topology: Topology
    saves: bool
    """Whether this run writes checkpoints at all."""
    max_rollbacks: int
    tell: Callable[[str], None] = print
    start_step: int = 0
    """Where this start of the run began."""
    start: dict[str, Any] = field(init=False)
    """The loader's place there."""

    def __post_init__(self) -> None:
        self.start = self.loader.state()

    def keep(self, state: TrainState) -> Path | None:
        """One complete checkpoint of this very step, if there is none yet; None if this run writes none or nothing was
        done. Raises CheckpointError if it cannot be had."""
        if not self.saves or state.step == 0:
            return None
        path = self.folder / step_folder_name(state.step)
        if not on_main(self.topology, lambda: _is_whole(path)):
            self.saver.save(self.engine, state)
            self.saver.wait()
        return path

    def settle(self) -> None:
        """Wait until no save is under way. One that fails is told of and ends nothing."""
        try:
            self.saver.wait()
        except CheckpointError as error:
            self._say(f"warning: {error}")

    def go_back(self, state: TrainState, steps: list[int]) -> None:
        """Weights, optimizer, place in the data, random states and `state` back to the newest checkpoint before `steps`,
        whose data will be passed over. Raises RollbackError if there is none, or if the run went back too often."""
        self.settle()
        if state.rollbacks >= self.max_rollbacks:
            raise RollbackError(
                f"step {state.step}: the run went back {state.rollbacks} time(s) already, faults.max_rollbacks="
                f"{self.max_rollbacks}. Fix: look at the documents named above, lower optim.lr, or allow more"
            )
        checkpoint = self._newest_before(steps[0])
        # It may be from before a change of ranks or, if this start began with it, of the data.
        way = way_of(checkpoint, self.saver.origin.layout, other_rows=True)
        found = load_checkpoint(checkpoint, self.engine, self.loader, self.topology, way)
        try:
            self.loader.load_state(found.loader)
        except DataError as error:
            if found.step != self.start_step:
                raise RollbackError(
                    f"step {steps[0]} was bad, and {checkpoint.path}, the newest whole checkpoint before it, belongs to other "
                    f"data. Fix: start again from there, checkpoint.resume={found.step}, with checkpoint.force as at the "
                    "change of the data; or use another policy: faults=default"
                ) from error
            self.loader.load_state(self.start)
            found.loader = self.start
        found.pending_record = {}  # it was shown when this start began
        found.passed_over = sorted({*found.passed_over, *state.passed_over, *steps})
        found.rollbacks = state.rollbacks + 1
        if self.topology.is_main:
            set_aside_newer(self.folder, checkpoint, self.tell)
        self._say(
            f"step {state.step}: going back to step {found.step}, {checkpoint.path}; the data of step(s) "
            f"{', '.join(map(str, steps))} will be passed over"
        )
        for item in fields(state):
            setattr(state, item.name, getattr(found, item.name))
        self.topology.barrier()

    def _newest_before(self, step: int) -> Checkpoint:
        """The newest whole one of this run before `step`; its bytes are verified, each rank a share."""
        for path in on_main(self.topology, lambda: step_folders(self.folder)):
            if int(path.name.removeprefix("step_")) >= step:
                continue
            found = inspect(path, self.topology, self._say, run=self.saver.origin.run)
            if not isinstance(found, str):
                return found
            self._say(f"warning: passing over a checkpoint: {found}")
        raise RollbackError(
            f"step {step} was bad and there is no whole checkpoint before it in {self.folder} to go back to. Fix: save more "
            "often (checkpoint.every), keep more of them (checkpoint.keep), or use another policy: faults=default"
        )

    def _say(self, text: str) -> None:
        if self.topology.is_main:
            self.tell(text)


def _is_whole(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def end_stopped(keeper: Keeper, state: TrainState, why: str | None, marker: Path, command: str) -> None:
    """Collective: everything kept, and `stopped.json` written: this run was stopped on purpose and waits to be resumed.

    why: of rank 0, if it was asked.
    """
    mend_streams()
    keeper.saver.put_off_copies()
    checkpoint = keeper.keep(state)
    reasons = [reason for reason in keeper.topology.gather_objects(why) if reason]
    if not keeper.topology.is_main:
        return
    if checkpoint is not None:
        command = from_newest(command)
    write_marker(marker, state, reasons[0], checkpoint, command)
    saved = f"saved in {checkpoint}" if checkpoint is not None else "nothing was saved"
    keeper.tell(
        f"stopped at step {state.step} ({reasons[0]}), {saved}. Go on with the same command:\n  {command}"
    )


def write_marker(path: Path, state: TrainState, why: str, checkpoint: Path | None, command: str) -> None:
    """Complete or absent, as everything that a restart relies on."""
    content = {
        "status": "stopped, resume me",
        "step": state.step,
        "reason": why,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "command": command,
        "folder": str(Path.cwd()),
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")


def resume_command(env: RankEnv) -> str:
    """The command that started this job, as far as it can be seen from rank 0: ask while the launcher lives."""
    own = shlex.join([sys.executable, *sys.argv])
    with suppress(psutil.Error):  # a launcher of another user, or one that is just ending
        levels = {"deepspeed": 2, "torchrun": 1}.get(env.launcher, 0)
        for process in reversed(psutil.Process().parents()[:levels]):
            words = process.cmdline()
            if any(Path(word).name in ("deepspeed", "torchrun") for word in words[:3]):
                return shlex.join(words)
    return own


def from_newest(command: str) -> str:
    """The same command, going on from the newest checkpoint, whichever this start was told to begin with."""
    return shlex.join(
        re.sub(r"^(\+{0,2}checkpoint\.resume)=.*", r"\1=auto", word, flags=re.DOTALL)
        for word in shlex.split(command)
    )


def mend_streams() -> None:
    """A console whose reader is gone, such as `tee` after Ctrl-C, must not end the run before it is saved: what is still
    printed goes nowhere then."""
    streams = select.poll()
    for number in (1, 2):
        streams.register(number, 0)  # asks for errors alone, as of a pipe that nobody reads
    for number, _ in streams.poll(0):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
