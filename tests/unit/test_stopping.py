"""The pieces of a stop and of going back: the marker, the command, a console that is gone, and what cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stack.checkpoint.manifest import hash_of
from stack.checkpoint.state import TrainState
from stack.dist.env import RankEnv
from stack.errors import CheckpointError, DataError, RollbackError
from stack.train import stopping
from stack.train.stopping import Keeper, end_stopped, from_newest, resume_command
from tests.unit.saving_rig import make_saver, names
from tests.unit.train_fakes import FakeEngine, FakeLoader, one_rank


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
    return Keeper(
        folder, saver, None, FakeLoader([]), one_rank(), saves, max_rollbacks=2, tell=lambda text: None
    )


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
    with pytest.raises(RollbackError, match=r"no whole checkpoint before it.*checkpoint\.keep"):
        kept.go_back(TrainState(step=7), [6, 7])
    with pytest.raises(RollbackError, match=r"2 time\(s\) already, faults\.max_rollbacks=2"):
        kept.go_back(TrainState(step=7, rollbacks=2), [7])


class Rows(FakeLoader):
    """A loader that knows its rows from others."""

    def __init__(self, rows: str, place: int):
        super().__init__([])
        self.rows, self.place = rows, place

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows, "place": self.place}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["rows"] != self.rows:
            raise DataError("the saved position belongs to other rows")
        self.place = state["place"]


def saved_course(folder: Path, told: list[str], *, rows: str = "old", start_step: int = 0) -> Keeper:
    """Checkpoints of steps 2, 4 and 6 that read the `old` rows; today's loader reads `rows`, from the first on."""
    saver = make_saver(folder, one_rank(), keep=0)
    for step in (2, 4, 6):
        state = TrainState(step=step, loader={"rows": "old", "place": step}, pending_record={"step": step})
        saver.save(FakeEngine(one_rank()), state)
    saver.wait()
    loader = Rows(rows, 0)
    keeper = Keeper(
        folder, saver, FakeEngine(one_rank()), loader, one_rank(), True, 2, told.append, start_step
    )
    loader.place = 9  # it has read on since
    return keeper


def test_going_back_passes_over_damaged_checkpoints_and_those_of_other_runs(tmp_path: Path) -> None:
    told: list[str] = []
    kept, state = saved_course(tmp_path, told), TrainState(step=8, rollbacks=1)
    manifest = tmp_path / "step_000006" / "manifest.json"
    content = json.loads(manifest.read_text()) | {"run": "theirs"}
    content["digest"] = hash_of({key: value for key, value in content.items() if key != "digest"})
    manifest.write_text(json.dumps(content))
    flip(tmp_path / "step_000004" / "rng_rank_00000.pt")
    kept.go_back(state, [7, 8])
    warnings = [line for line in told if line.startswith("warning: passing over")]
    assert "step_000006 is of another run" in warnings[0] and "step_000004 is damaged" in warnings[1]
    assert (state.step, state.rollbacks, state.passed_over, kept.loader.place) == (2, 2, [7, 8], 2)
    assert state.pending_record == {}  # else it would be shown again at the next start
    assert names(tmp_path) == ["step_000002", "step_000004.abandoned", "step_000006.abandoned"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_going_back_to_where_the_data_was_changed_reads_the_new_rows_from_the_first_on(
    tmp_path: Path,
) -> None:
    kept, state = saved_course(tmp_path, [], rows="new", start_step=6), TrainState(step=8)
    kept.go_back(state, [7, 8])
    assert state.step == 6 and kept.loader.place == 0
    assert state.loader == {"rows": "new", "place": 0}


def test_going_back_behind_a_change_of_the_data_is_refused_with_the_way_out(tmp_path: Path) -> None:
    kept = saved_course(tmp_path, [], rows="new", start_step=5)
    with pytest.raises(
        RollbackError, match=r"step_000006.*other data.*checkpoint\.resume=6, with checkpoint\.force"
    ):
        kept.go_back(TrainState(step=8), [7, 8])
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000006"]


def test_an_end_waits_for_the_save_under_way_whatever_becomes_of_it(tmp_path: Path) -> None:
    class Slow(FakeSaver):
        def wait(self) -> None:
            self.saved.append(0)
            super().wait()

    for error in ("", "disk full"):
        told, saver = [], Slow(error)
        kept = keeper(tmp_path, saver)
        kept.tell = told.append
        kept.settle()
        assert saver.saved == [0] and told == [f"warning: {error}"] * bool(error)
        with pytest.raises(RollbackError, match="time"):
            kept.go_back(TrainState(step=7, rollbacks=2), [7])
        assert saver.saved == [0, 0]


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("checkpoint.resume=2", "checkpoint.resume=auto"),
        ("+checkpoint.resume=none", "+checkpoint.resume=auto"),
        ("'++checkpoint.resume=/a b/step_000002'", "++checkpoint.resume=auto"),
        ("'checkpoint.force=[data.path]'", "'checkpoint.force=[data.path]'"),
        ("checkpoint.weights_from=checkpoint.resume=2", "checkpoint.weights_from=checkpoint.resume=2"),
        ("name=a", "name=a"),
    ],
)
def test_command_goes_on_from_the_newest_checkpoint(given: str, printed: str, tmp_path: Path) -> None:
    assert from_newest(f"python train.py {given} seed=1") == f"python train.py {printed} seed=1"
    told: list[str] = []
    for saves in (True, False):  # where nothing was saved, the newest is not where the run stands
        kept, marker = keeper(tmp_path, FakeSaver(), saves), tmp_path / "stopped.json"
        kept.tell = told.append
        end_stopped(kept, TrainState(step=7), "SIGTERM", marker, f"python train.py {given}")
        expected = f"python train.py {printed if saves else given}"
        assert json.loads(marker.read_text())["command"] == expected
        assert told[-1].endswith(f"\n  {expected}")


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
