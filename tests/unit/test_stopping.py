"""The pieces of a stop and of going back: the marker, the command, a console that is gone, and what cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stack.checkpoint.state import TrainState
from stack.dist.env import RankEnv
from stack.errors import CheckpointError, RollbackError
from stack.train import stopping
from stack.train.stopping import Keeper, end_stopped, resume_command
from tests.unit.train_fakes import one_rank


class FakeSaver:
    """Counts saves; fails if told to."""

    origin: Any = None

    def __init__(self, error: str = ""):
        self.saved: list[int] = []
        self.error = error

    def save(self, engine: Any, state: TrainState) -> None:
        self.saved.append(state.step)

    def put_off_copies(self) -> None:
        pass

    def wait(self) -> None:
        if self.error:
            raise CheckpointError(self.error)


def keeper(folder: Path, saver: FakeSaver, saves: bool = True) -> Keeper:
    return Keeper(folder, saver, None, None, one_rank(), saves, max_rollbacks=2, tell=lambda text: None)


def test_stop_saves_this_step_and_leaves_a_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, marker = FakeSaver(), tmp_path / "stopped.json"
    monkeypatch.setattr(stopping, "mend_streams", lambda: saver.saved.append(0))
    end_stopped(keeper(tmp_path, saver), TrainState(step=7), "SIGTERM", marker, "python train.py name=a")
    content = json.loads(marker.read_text())
    assert saver.saved == [0, 7]  # the console is seen to before anything is told
    assert content["status"] == "stopped, resume me" and content["step"] == 7
    assert content["reason"] == "SIGTERM" and content["command"] == "python train.py name=a"
    assert content["checkpoint"] == str(tmp_path / "step_000007")
    assert [path.name for path in tmp_path.iterdir()] == ["stopped.json"]


@pytest.mark.parametrize(("step", "saves"), [(0, True), (7, False)])
def test_nothing_is_saved_before_the_first_step_or_by_a_run_that_saves_nothing(
    step: int, saves: bool, tmp_path: Path
) -> None:
    saver = FakeSaver()
    end_stopped(
        keeper(tmp_path, saver, saves), TrainState(step=step), "SIGINT", tmp_path / "stopped.json", "x"
    )
    assert saver.saved == []
    assert json.loads((tmp_path / "stopped.json").read_text())["checkpoint"] is None


def test_stop_whose_checkpoint_fails_leaves_no_marker(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="disk full"):
        end_stopped(
            keeper(tmp_path, FakeSaver("disk full")),
            TrainState(step=7),
            "SIGTERM",
            tmp_path / "stopped.json",
            "x",
        )
    assert not list(tmp_path.iterdir())


def test_going_back_needs_a_checkpoint_and_is_done_so_often(tmp_path: Path) -> None:
    kept = keeper(tmp_path, FakeSaver("a save that failed is no reason"))
    with pytest.raises(RollbackError, match="no checkpoint before it"):
        kept.go_back(TrainState(step=7), [6, 7])
    with pytest.raises(RollbackError, match=r"2 time\(s\) already, faults\.max_rollbacks=2"):
        kept.go_back(TrainState(step=7, rollbacks=2), [7])


def test_command_of_a_plain_process_is_its_own() -> None:
    command = resume_command(RankEnv(0, 1, 0, 1, "127.0.0.1", 1, "plain"))
    assert command.startswith(sys.executable)


def test_console_whose_reader_is_gone_ends_nothing() -> None:
    code = """
import sys
from stack.train.stopping import mend_streams
sys.stdin.read()
mend_streams()
print("lost", flush=True)
print("lost too", file=sys.stderr, flush=True)
sys.exit(7)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        process.stderr.close()
        process.stdin.close()
        assert process.wait(60) == 7
