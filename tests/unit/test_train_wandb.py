"""W&B: one run over restarts, each step once, and no trouble of it ever stops or delays training."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from stack.checkpoint.state import TrainState
from stack.config.schema import LogConfig
from stack.train import wandb as wandb_module
from stack.train.wandb import WandbHook, WandbMemory, wandb_mode
from tests.wandb_files import offline_runs

ROOT = Path(__file__).resolve().parents[2]


def record_of(step: int) -> dict[str, Any]:
    record: dict[str, Any] = {"step": step, "loss": 1 / step, "grad_norm": None}
    return record | ({"eval_loss": 2 / step} if step % 4 == 0 else {})


def log_steps(
    folder: Path, resume_step: int, last: int, told: list[str], mode: str = "offline", ends: bool = True
) -> WandbHook:
    """One start of a job: the journal up to `resume_step`, steps up to `last`, and a good end unless it is killed."""
    earlier = [record_of(step) for step in range(1, resume_step + 1)]
    hook = WandbHook(LogConfig(), mode, "name", folder, {"seed": 1}, earlier, told.append)
    for step in range(resume_step + 1, last + 1):
        hook.after_step(TrainState(step=step), record_of(step))
    if ends:
        hook.close()
    return hook


def next_second() -> None:
    """W&B names a run's folder by the second of its start: two starts in one would share it."""
    time.sleep(1.1)


KILLED_START = """
import os, sys, time
from pathlib import Path
from tests.unit.test_train_wandb import log_steps
log_steps(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [], ends=False)
while not list(Path(sys.argv[1]).glob("wandb/offline-run-*/files")):
    time.sleep(0.05)
os._exit(1)
"""


def killed_start(folder: Path, resume_step: int, last: int) -> None:
    command = [sys.executable, "-c", KILLED_START, str(folder), str(resume_step), str(last)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == 1


def test_killed_and_restarted_offline_run_keeps_its_id_and_holds_each_step_once(tmp_path: Path) -> None:
    told: list[str] = []
    killed_start(tmp_path, 0, 7)
    killed_start(tmp_path, 5, 8)  # the checkpoint was of step 5: steps 6 and 7 are done again
    log_steps(tmp_path, 5, 10, told)
    next_second()
    log_steps(tmp_path, 10, 12, told)  # the run was made longer
    assert told == []
    runs = offline_runs(tmp_path)
    assert [[row["step"] for row in history] for _, history in runs] == [list(range(1, 11)), [11, 12]]
    assert len({run_id for run_id, _ in runs}) == 1
    rows = [row for _, history in runs for row in history]
    assert [row["_step"] for row in rows] == list(
        range(1, 13)
    )  # W&B's own counter never falls behind, or it drops rows
    assert {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row} == {
        4: 0.5,
        8: 0.25,
        12: 2 / 12,
    }
    assert all(row["loss"] == 1 / row["step"] and "grad_norm" not in row for row in rows)


SERVICE_KILLED = """
import signal, sys, time
from pathlib import Path
import psutil
from stack.checkpoint.state import TrainState
from tests.unit.test_train_wandb import log_steps, record_of
told = []
hook = log_steps(Path(sys.argv[1]), 0, 3, told, ends=False)
while not list(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")):
    time.sleep(0.05)
children = psutil.Process().children(recursive=True)
for child in children:
    child.send_signal(signal.Signals[sys.argv[2]])
psutil.wait_procs([child for child in children if child.name() == "wandb-core"], 30)
hook.after_step(TrainState(step=4), record_of(4))
hook.close()
print(*told, "the last line", sep="\\n", flush=True)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_signal_to_all_processes_leaves_our_last_line_the_last(tmp_path: Path, name: str) -> None:
    """deepspeed's launcher and Slurm send SIGTERM to W&B's own process too."""
    command = [sys.executable, "-c", SERVICE_KILLED, str(tmp_path), name]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    warning, last = ended.stdout.splitlines()[-2:]
    assert ended.returncode == 0 and last == "the last line", ended.stdout
    assert warning.startswith("warning: W&B stopped (") and "metrics.jsonl" in warning
    next_second()
    log_steps(tmp_path, 4, 5, [])
    ((_, history),) = offline_runs(tmp_path)
    assert [row["step"] for row in history] == [1, 2, 3, 4, 5]


def test_fresh_start_in_the_same_folder_is_another_run(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 2, [])
    next_second()
    log_steps(tmp_path, 0, 2, [])
    (first, _), (second, history) = offline_runs(tmp_path)
    assert first != second
    assert [row["step"] for row in history] == [1, 2]


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"run_id": 3}', '{"run_id": "a", "last_step": null}', "\x00"]
)
def test_what_was_noted_for_a_restart_may_be_damaged(tmp_path: Path, text: str) -> None:
    told: list[str] = []
    (tmp_path / "wandb.json").write_text(text)
    memory = WandbMemory.recall(tmp_path / "wandb.json", 5, told.append)
    assert len(told) == 1 and "wandb.json cannot be read" in told[0]
    assert WandbMemory.recall(tmp_path / "wandb.json", 5, told.append) == memory and len(told) == 1


class FakeRun:
    def __init__(self, step: int = 0) -> None:
        self.step, self.dir = step, "wandb/offline-run-1/files"
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.metrics: list[tuple[str, str | None]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        pass


def fake_wandb(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.Settings = lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_unreachable_server_falls_back_to_offline_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, modes, told = FakeRun(), [], []

    def init(mode: str, **settings: Any) -> FakeRun:
        modes.append(mode)
        if mode == "online":
            raise ConnectionError("no route")
        return run

    fake_wandb(monkeypatch, init)
    log_steps(tmp_path, 0, 3, told, mode="online")
    assert modes == ["online", "offline"]
    assert len(told) == 1 and "no route" in told[0]
    assert [step for step, _ in run.rows] == [1, 2, 3]
    assert ("*", "step") in run.metrics


@pytest.mark.parametrize("known", [0, 4, 7])
def test_resumed_online_run_gets_what_the_server_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    settings: list[dict[str, Any]] = []
    runs = [FakeRun(), FakeRun(step=known + 1)]

    def init(**given: Any) -> FakeRun:
        settings.append(given)
        return runs[len(settings) - 1]

    fake_wandb(monkeypatch, init)
    log_steps(tmp_path, 0, 7, [], mode="online")
    log_steps(tmp_path, 5, 9, [], mode="online")
    assert [step for step, _ in runs[1].rows] == list(range(known + 1, 10))
    assert settings[0]["id"] == settings[1]["id"] and settings[1]["resume"] == "allow"


@pytest.mark.parametrize("place", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3)])
def test_any_failure_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    def fail(*args: Any, **settings: Any) -> Any:
        raise error

    run, told = FakeRun(), []
    monkeypatch.setattr(run, "log", fail if place == "log" else run.log)
    monkeypatch.setattr(run, "finish", fail if place == "finish" else run.finish)
    fake_wandb(monkeypatch, fail if place == "init" else lambda **settings: run)
    log_steps(tmp_path, 0, 3, told)
    assert len(told) == 1 and type(error).__name__ in told[0] and "training goes on" in told[0]


def test_call_that_hangs_delays_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, told = threading.Event(), []
    fake_wandb(monkeypatch, lambda **settings: never.wait(60))
    monkeypatch.setattr(wandb_module, "FINISH_S", 0.0)
    monkeypatch.setattr(wandb_module, "GRACE_S", 0.1)
    log_steps(tmp_path, 0, 3, told)
    assert len(told) == 1 and "did not finish in time" in told[0]
    never.set()


NETRC = "machine api.wandb.ai login user password {}\n".format("0" * 40)


@pytest.mark.parametrize(
    "setting, environ, netrc, mode",
    [
        ("auto", {}, "", "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "", "online"),
        ("auto", {}, NETRC, "online"),
        ("auto", {"WANDB_BASE_URL": "https://wandb.example.org"}, NETRC, "offline"),
        ("auto", {}, "not a netrc", "offline"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "", "offline"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "dryrun"}, "", "offline"),
        ("auto", {"WANDB_MODE": "online"}, "", "online"),
        ("auto", {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, "", "disabled"),
        ("online", {"WANDB_MODE": "offline"}, "", "online"),
        ("offline", {"WANDB_API_KEY": "k"}, "", "offline"),
        ("disabled", {"WANDB_API_KEY": "k"}, "", "disabled"),
    ],
)
def test_mode(tmp_path: Path, setting: Any, environ: dict[str, str], netrc: str, mode: str) -> None:
    file = tmp_path / "netrc"
    file.write_text(netrc)
    file.chmod(0o600)
    assert wandb_mode(LogConfig(wandb=setting), environ | {"NETRC": str(file)}) == mode
