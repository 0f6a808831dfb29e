"""Machines: each number has a source, and what was measured replaces what was assumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stack.config.compose import CONF, compose_config
from stack.config.ranges import range_faults
from stack.errors import ConfigError
from stack.plan.calibration import calibration_line
from stack.plan.closed_form import plan
from stack.plan.machine import UNITS, read_machine
from stack.plan.verdict import need_of
from tests.unit.plan_rig import configured

SITES = sorted(file.stem for file in (CONF / "site").glob("*.yaml"))
CARDS = [name for name in SITES if name not in ("auto", "cpu")]


@pytest.mark.parametrize("name", CARDS)
def test_a_site_has_all_that_a_forecast_needs_and_says_where_from(name: str) -> None:
    cfg = compose_config([f"site={name}"], strict=False)
    assert not list(range_faults(cfg)) and cfg.site.name == name
    machine = read_machine(cfg.site)
    assert machine.missing(1) == [] and cfg.site.memory_gib and cfg.site.host_memory_gib and cfg.site.card
    text = (CONF / "site" / f"{name}.yaml").read_text()
    head = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    if cfg.site.gpus_a_node == 1:
        assert f"conf/site/{name}x8.yaml" in head
        return
    assert machine.missing(8) == machine.missing(64) == []
    for word in ("Peak:", "memory_gib", "data sheet", "link", "network", "Host", "attention_share"):
        assert word in head or "conf/site/" in head, f"{name}: where is {word} from?"


def test_cards_that_were_asked_for_are_there() -> None:
    assert {"a100x8", "a100_40x8", "h100x8", "h200x8", "b200x8", "mi300x8", "cpu"} <= set(SITES)


def test_every_constant_names_its_source() -> None:
    machine = read_machine(configured().site)
    constants = machine.constants()
    assert all(one.source == "assumed (conf/site/h100x8.yaml)" for one in constants.values())
    assert constants.keys() == UNITS.keys()


def test_a_measurement_replaces_what_was_assumed(tmp_path: Path) -> None:
    file = tmp_path / "calibration.jsonl"
    lines = [
        calibration_line("context_gib", 9.0, "GiB", "an older one", None, "H100"),
        calibration_line("context_gib", 1.5, "GiB", "nvidia-smi", 0.6, "H100"),
        calibration_line("reserve_share", 0.10, "of live bytes", "warm steps", 0.03, "H100"),
        calibration_line("step_s", 400.0, "s", "warm steps", 380.0, "H100"),
    ]
    file.write_text("".join(lines))
    cfg = configured("+exp=qwen3_1m", "model.architecture.num_hidden_layers=2")
    assumed, measured = read_machine(cfg.site), read_machine(cfg.site, tmp_path)
    assert measured.site.context_gib == 1.5 and measured.site.peak_tflops == assumed.site.peak_tflops
    found = plan(cfg, 8, measured)
    assert found.constants["context_gib"].source.startswith(f"measured here ({file}")
    assert found.constants["gemm_share"].source.startswith("assumed")
    # What was measured needs no margin for what nobody knew.
    before = plan(cfg, 8, assumed)
    assert measured.calibrated and not assumed.calibrated
    assert need_of(found, measured) == pytest.approx(1.03 * found.memory.needed_bytes, rel=1e-6)
    assert need_of(before, assumed) > 1.1 * before.memory.peak.num_bytes
    assert found.memory.overhead_bytes == pytest.approx(
        1.5 * 2**30 + 0.10 * found.memory.peak.num_bytes, rel=1e-6
    )


@pytest.mark.parametrize("text", ["{not json", "[1, 2]"])
def test_a_damaged_calibration_is_refused_by_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.jsonl"
    file.write_text(json.dumps({"constant": "context_gib", "value": 1}) + "\n" + text + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_machine(configured().site, file)
    with pytest.raises(ConfigError, match="calibration="):
        read_machine(configured().site, tmp_path / "none.jsonl")
