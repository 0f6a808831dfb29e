"""`launch/bench.py` as a user starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launchers import Started

SMALL = ("model=micro", "engine.precision=fp32", "memory.loss_tile=16", "memory.mlp_tile=16")


def bench(cwd: Path, *arguments: str, timeout_s: float = 500) -> tuple[int, str]:
    script = Path(__file__).resolve().parents[2] / "launch/bench.py"
    with Started([((sys.executable, str(script), *arguments), {})], cwd) as started:
        ended = started.wait(timeout_s)
    return ended.codes[0], ended.output


def test_baseline_and_presets_side_by_side(tmp_path: Path) -> None:
    options = ("--contenders", "baseline,lean", "--lengths", "64", "--steps", "2", "--out", "found")
    code, output = bench(tmp_path, *options, *SMALL)
    assert code == 0, output
    assert "lean over baseline: step" in output
    found = json.loads((tmp_path / "found/bench.json").read_text())
    assert (tmp_path / "found/bench.png").stat().st_size > 10_000
    baseline, lean = found["results"]
    assert (baseline["contender"], lean["contender"]) == ("baseline", "lean")
    assert lean["loss"] == pytest.approx(baseline["loss"], rel=1e-5)
    assert lean["grad_norm"] == pytest.approx(baseline["grad_norm"], rel=1e-3)
    updates = found["updates"]["64"]
    assert updates["lean"][1][0] == pytest.approx(updates["baseline"][1][0], rel=1e-4)
    assert updates["baseline"][1][0] < updates["baseline"][0][0]  # real updates were made
    for row in found["results"]:
        assert row["step_s"]["least"] <= row["step_s"]["median"] <= row["step_s"]["most"]
        assert row["mfu"] > 0 and row["hfu"] > 0 and row["over_products"] > 1
        assert row["rss_bytes"] > row["peak_bytes"] >= row["passes_peak_bytes"] > row["states_bytes"] > 0
        assert {"all-to-all", "all-gather", "reduce-scatter"} <= row["traffic"].keys()
    # 2 layers; q, k, v and the output each by itself, forward, recomputed and backward.
    assert baseline["traffic"]["all-to-all"]["calls"] == 2 * 4 * 3
    kinds = {call["kind"]: 0 for call in found["calls"]["64"]["lean"]}
    for call in found["calls"]["64"]["baseline"]:
        kinds[call["kind"]] += call["number"]
    assert (kinds["attention_forward"], kinds["attention_backward"]) == (4, 2)


def test_a_failing_contender_is_named_with_its_cause(tmp_path: Path) -> None:
    options = ("--contenders", "plain", "--lengths", "64", "--out", "found")
    code, output = bench(tmp_path, *options, *SMALL, "model.architecture.hidden_act=nonsense")
    assert code == 1
    assert "Traceback" not in output
    assert "error: contender plain, rank 0:" in output and "nonsense" in output
    assert "found/logs/plain-rank0.log" in output


def test_wrong_settings_are_told_at_once(tmp_path: Path) -> None:
    code, output = bench(tmp_path, "--contenders", "baseline,leen", "optim.lr=fast")
    assert code == 1
    assert "leen" in output and "Traceback" not in output
    assert not (tmp_path / "runs").exists()
