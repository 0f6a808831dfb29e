"""What a run shows and keeps: journal, console, curve, summary, run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stack.checkpoint.state import TrainState
from stack.config.schema import DataConfig, OptimConfig, RunConfig
from stack.errors import LaunchError
from stack.train.console import ConsoleHook, format_duration
from stack.train.folder import RunFolder, take_folder, write_config
from stack.train.journal import JournalHook, read_journal
from stack.train.report import draw_curve, summarize
from stack.train.wandb import WandbMemory


def record_of(step: int, **values: Any) -> dict[str, Any]:
    record = {
        "step": step,
        "loss": 4.0 / step,
        "grad_norm": 1.5,
        "clipped": False,
        "lr": 1e-3,
        "skipped": None,
        "rows": 4,
        "tokens_per_s": 1234.0,
        "tokens_per_s_per_rank": 617.0,
        "tokens_total": 100 * step,
        "targets_total": 90 * step,
        "skipped_steps": 0,
        "overflow_steps": 0,
        "empty_steps": 0,
        "small_steps": 0,
        "dropped_steps": 0,
        "host_rss_gib": 0.5,
    }
    return record | values


def keep(path: Path, resume_step: int, last: int) -> None:
    hook = JournalHook(path, resume_step)
    for step in range(resume_step + 1, last + 1):
        hook.after_step(TrainState(step=step), record_of(step))
    hook.close()


def test_journal_holds_each_step_once_after_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keep(path, 0, 7)
    keep(path, 5, 9)
    with open(path, "a") as file:
        file.write('{"step": 10, "lo')  # cut short by a kill
    keep(path, 9, 12)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 13))
    keep(path, 0, 2)  # a fresh start
    assert [record["step"] for record in read_journal(path)] == [1, 2]


def test_a_damaged_line_takes_no_other_along_and_the_file_is_kept(tmp_path: Path) -> None:
    path, told = tmp_path / "metrics.jsonl", list[str]()
    keep(path, 0, 9)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2], lines[4], lines[6] = b'{"step": 3, \x00\xff\n', b"[5]\n", b'{"loss": 7}\n'
    path.write_bytes(b"".join(lines))
    assert [record["step"] for record in read_journal(path)] == [1, 2, 4, 6, 8, 9]
    JournalHook(path, 8, told.append).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 4, 6, 8]
    assert len(told) == 1 and "3 line(s)" in told[0] and "(line 3, 5, 7)" in told[0]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b"".join(lines)
    JournalHook(path, 8, told.append).close()
    assert len(told) == 1, "what was told is mended"


class FullDisk:
    """Takes `room` bytes, and then none until it is given more."""

    def __init__(self, file: Any, room: int):
        self._file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return taken

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_ends_no_run_and_costs_no_line(tmp_path: Path) -> None:
    path, told = tmp_path / "metrics.jsonl", list[str]()
    hook: Any = JournalHook(path, 0, told.append)
    disk = hook._file = FullDisk(hook._file, 30)
    for step in range(1, 4):
        hook.after_step(TrainState(step=step), record_of(step))
    assert len(told) == 1 and "No space left" in told[0] and path.stat().st_size == 30
    disk.room = 10**6
    hook.after_step(TrainState(step=4), record_of(4))
    assert read_journal(path) == [record_of(step) for step in range(1, 5)] and "none is missing" in told[1]
    disk.room = 0
    hook.after_step(TrainState(step=5), record_of(5))
    hook.close()
    assert "the last 1 step(s) could not be written" in told[-1]


def test_files_of_a_run_that_cannot_be_written_are_a_clear_error_or_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(LaunchError, match=r"metrics\.jsonl cannot be written.*Fix: free some space"):
        JournalHook(gone / "metrics.jsonl", 0)
    with pytest.raises(LaunchError, match=r"config\.yaml cannot be written.*Fix: free some space"):
        write_config(RunFolder(gone), RunConfig(name="a"))
    draw_curve([record_of(1)], gone / "curve.png", "a")
    assert "warning: the curve could not be written" in capsys.readouterr().out
    told: list[str] = []
    WandbMemory.recall(gone / "wandb.json", 0, told.append)
    assert len(told) == 1 and "wandb.json cannot be written" in told[0]


def show(capsys: pytest.CaptureFixture[str], hook: ConsoleHook, *records: dict[str, Any]) -> list[str]:
    for record in records:
        hook.after_step(TrainState(step=record["step"]), record)
    return capsys.readouterr().out.splitlines()


def test_progress_line_has_loss_speed_time_left_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"data_wait_s": 0.01, "step_s": 2.0}
    record = record_of(1, **times, clipped=True, mfu=0.345, memory_allocated_peak_gib=70.25, eval_loss=3.5)
    (line,) = show(capsys, ConsoleHook(1, 10), record)
    for part in (
        "step 1/10",
        "loss 4.0000",
        "grad 1.5 (clipped)",
        "lr 1.00e-03",
        "tokens/s 1,234 (617 a rank)",
        "data wait 0.5%",
        "MFU 34.5%",
        "device 70.2 GiB",
        "host 0.50 GiB",
        "eval loss 3.5000",
        "ETA ",
    ):
        assert part in line
    assert "\n" not in line


def test_no_mfu_is_shown_without_a_known_peak(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = show(capsys, ConsoleHook(1, 10), record_of(1))
    assert "MFU" not in line and "device" not in line


def test_skipped_and_smaller_steps_are_told_even_between_progress_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = show(
        capsys,
        ConsoleHook(5, 10),
        record_of(1),
        record_of(2, loss=None, skipped="nonfinite loss on rank 1", skipped_steps=1),
        record_of(3, small_steps=1, rows=2, skipped_steps=1),
        record_of(4, small_steps=1, skipped_steps=1),
        record_of(5, loss=None, skipped_steps=1),
    )
    assert len(lines) == 4
    assert lines[1] == "step 2: skipped (nonfinite loss on rank 1); 1 skipped so far"
    assert "smaller step of 2 row(s)" in lines[2]
    assert "loss -" in lines[3]


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3600, "1:00:00"), (93784, "1d 02:03:04")],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_curve_is_a_picture_also_with_gaps_and_without_evaluation(tmp_path: Path) -> None:
    import matplotlib.image

    records = [record_of(1), record_of(2, loss=None), record_of(3, eval_loss=2.0)]
    for name, drawn in {"full": records, "gap": records[:2], "empty": []}.items():
        path = tmp_path / f"{name}.png"
        draw_curve(drawn, path, "run")
        height, width, _ = matplotlib.image.imread(path).shape
        assert height >= 500 and width >= 900
    assert (tmp_path / "full.png").read_bytes() != (tmp_path / "gap.png").read_bytes()


def test_summary_names_places_counts_and_what_to_try() -> None:
    final = record_of(
        9, eval_loss=0.5, eval_perplexity=1.65, eval_targets=300, skipped_steps=2, small_steps=1
    )
    waits = record_of(8, data_wait_s=0.25, step_s=3.0), final | {"data_wait_s": 0.0, "step_s": 2.0}
    final = waits[1] | {"tokens_total/books": 700, "tokens_total/code": 200}
    places = {"run folder": Path("runs/a"), "curve": Path("runs/a/curve.png"), "model": Path("runs/a/hf")}
    text = summarize([record_of(1), final], places, 9, wandb_offline=True)
    assert "5.00% of the steps' time was waiting for rows" in summarize(
        [*waits], places, 9, wandb_offline=True
    )
    for part in (
        "complete",
        "4.0000 at the first step, 2.2222 over the last 2 of 9 steps",
        "held-out loss 0.5000, perplexity 1.65, 300 tokens",
        "900 read, 810 predicted",
        "0.00% of the steps' time was waiting for rows",
        "700 from books, 200 from code",
        "2 skipped for NaN or inf, 1 of an incomplete last window",
        "runs/a/curve.png",
        "from_pretrained('runs/a/hf')",
        "wandb sync runs/a/wandb/offline-run-*",
        "name=NEW_NAME",
    ):
        assert part in text
    assert "stopped at step 9" in summarize([record_of(1), final], places, 12, wandb_offline=False)
    assert "stopped at step 0" in summarize([], places, 12, wandb_offline=False)


def test_run_folder_is_the_same_after_a_restart_with_the_settings_of_the_last_start(tmp_path: Path) -> None:
    told: list[str] = []
    folder, lock = take_folder(tmp_path / "runs" / "a", told.append)
    write_config(folder, RunConfig(name="a"))
    lock.close()
    assert yaml.safe_load(folder.config.read_text())["optim"]["lr"] == 1e-5
    again, lock = take_folder(tmp_path / "runs" / "a", told.append)
    cfg = RunConfig(name="a", optim=OptimConfig(lr=1e-3), data=DataConfig(seq_len=128))
    write_config(again, cfg)
    lock.close()
    assert again == folder and told == []
    assert yaml.safe_load(folder.config.read_text())["optim"]["lr"] == 1e-3
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "lock"]


def test_second_job_of_the_same_name_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from stack.train.folder import take_folder
folder, lock = take_folder(Path({str(tmp_path / "a")!r}), print)
print("taken", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(LaunchError, match=f"in use by process {other.pid} on .*name=NEW_NAME"):
            take_folder(tmp_path / "a", print)
        other.kill()
        other.wait()
    take_folder(tmp_path / "a", print)[1].close()  # the lock died with its process


def test_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="set `out`"):
        take_folder(tmp_path / "file" / "a", print)
