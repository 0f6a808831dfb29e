"""The command of the README on all GPUs of this machine, and fp16 through a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.machine import COUNT, REHEARSAL
from tests.launchers import BIN, ROOT, Ended, Started

LIMIT_S = 200
DEGREE = [] if COUNT % 2 == 0 else ["parallel.sp=1"]  # as in the Makefile


def run(folder: Path, *overrides: str) -> tuple[Ended, list[dict[str, Any]]]:
    """The end of the run, and its journal."""
    command = [
        str(BIN / "deepspeed"),
        "--num_gpus",
        str(COUNT),
        str(ROOT / "launch" / "train.py"),
        *overrides,
    ]
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "2"} if REHEARSAL else {}
    with Started([(command, env)], folder) as started:
        ended = started.wait(LIMIT_S)
    assert ended.codes == [0], ended.output
    (journal,) = folder.glob("runs/*/metrics.jsonl")
    return ended, [json.loads(line) for line in journal.read_text().splitlines()]


def test_quickstart(tmp_path: Path) -> None:
    ended, records = run(tmp_path, "+exp=quickstart", "schedule.steps=3", "schedule.warmup_steps=1", *DEGREE)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0]["loss"] == pytest.approx(8.318, abs=0.1), "ln(4096): guessing"
    assert records[2]["loss"] < records[0]["loss"] and records[2]["eval_loss"] < records[0]["loss"]
    assert all(record["skipped"] is None for record in records)
    assert REHEARSAL or all(record["memory_allocated_peak_gib"] > 0 for record in records)
    assert "The run is complete." in ended.output
    assert (tmp_path / "runs" / "quickstart" / "hf" / "model.safetensors").is_file()


@pytest.mark.skipif(REHEARSAL, reason="fp16 is refused on the CPU")
def test_steps_that_the_loss_scaler_skips_are_counted(tmp_path: Path) -> None:
    settings = ["site=auto", "engine.precision=fp16", "checkpoint=none", "schedule.steps=14", "name=scaled"]
    scaler = ["engine.overrides.fp16.initial_scale_power=26", "engine.overrides.fp16.hysteresis=1"]
    ended, records = run(tmp_path, "+exp=tiny_cpu", *settings, *scaler, "engine.max_nonfinite_steps=0")
    skipped = [record["skipped"] for record in records]
    count = skipped.count("loss-scale")
    assert skipped[0] == "loss-scale" and set(skipped) == {None, "loss-scale"} and not any(skipped[-3:])
    assert records[-1]["overflow_steps"] == count and records[-1]["skipped_steps"] == 0
    assert records[-1]["loss_scale"] == 2.0 ** (26 - count)
    assert "step 1: skipped (loss-scale)" in ended.output
