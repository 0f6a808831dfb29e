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
from stack.plan.verdict import need_of, verdict
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
        calibration_line("context_gib", 9.0, "GiB", "an older one", None, "H100", 8),
        calibration_line("context_gib", 1.5, "GiB", "nvidia-smi", 0.6, "H100", 8),
        calibration_line("reserve_share", 0.10, "of live bytes", "warm steps", 0.03, "H100", 8),
        calibration_line("step_s", 400.0, "s", "warm steps", 380.0, "H100", 8),
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
    assert measured.calibrated(8) and not assumed.calibrated(8)
    assert need_of(found, measured) == pytest.approx(1.03 * found.memory.needed_bytes, rel=1e-6)
    assert need_of(before, assumed) > 1.1 * before.memory.peak.num_bytes
    assert found.memory.overhead_bytes == pytest.approx(
        1.5 * 2**30 + 0.10 * found.memory.peak.num_bytes, rel=1e-6
    )


def test_what_few_ranks_measured_proves_nothing_of_many(tmp_path: Path) -> None:
    lines = [
        calibration_line("context_gib", 1.5, "GiB", "nvidia-smi", 0.6, "H100", 8),
        calibration_line("reserve_share", 0.10, "of live bytes", "warm steps", 0.03, "H100", 16),
    ]
    (tmp_path / "calibration.jsonl").write_text("".join(lines))
    cfg = configured("+exp=qwen3_1m", "parallel.sp=8")
    machine = read_machine(cfg.site, tmp_path)
    assert machine.measured_ranks == 8 and any("at most 8 ranks" in remark for remark in machine.remarks)
    few, many = plan(cfg, 8, machine), plan(cfg, 64, machine)
    assert need_of(few, machine) == pytest.approx(1.03 * few.memory.needed_bytes, rel=1e-6)
    assert need_of(many, machine) > 1.1 * many.memory.peak.num_bytes + 4 * 2**30
    assert verdict(few, machine).answer == "fits" and verdict(many, machine).answer == "unproven"
    # A line without ranks, as older files have it, is one rank's.
    alone = {"constant": "context_gib", "value": 1.5, "device": "H100"}
    (tmp_path / "calibration.jsonl").write_text(json.dumps(alone) + "\n" + lines[1])
    assert read_machine(cfg.site, tmp_path).measured_ranks == 1


def test_what_was_put_over_a_site_is_not_said_to_be_from_its_file(tmp_path: Path) -> None:
    found = read_machine(configured("site.memory_gib=40").site).constants()
    assert found["memory_gib"].source == "given (over conf/site/h100x8.yaml)"
    assert found["gemm_share"].source == "assumed (conf/site/h100x8.yaml)"
    own = tmp_path / "site"
    own.mkdir()
    (own / "ours.yaml").write_text("name: ours\ndevice: cuda\nmemory_gib: 20\n")
    cfg = compose_config(["site=ours"], strict=False, folder=str(tmp_path))
    found = read_machine(cfg.site).constants()
    assert found["memory_gib"].source == "given (site=ours)"
    assert found["gemm_share"].source == "assumed (defaults of stack/config/schema_site.py)"


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("link_gb_s", 0),
        ("gemm_share", -0.1),
        ("attention_share", "NaN"),
        ("host_link_gb_s", True),
        ("context_gib", None),
    ],
)
def test_a_value_that_can_be_no_measurement_is_refused_by_line(
    tmp_path: Path, constant: str, value: object
) -> None:
    file = tmp_path / "calibration.jsonl"
    text = json.dumps({"constant": constant, "value": float("nan") if value == "NaN" else value})
    file.write_text(f"\n{text}\n")
    with pytest.raises(ConfigError, match=rf"{constant} \(line 2"):
        read_machine(configured().site, file)


def test_a_file_of_another_device(tmp_path: Path) -> None:
    file = tmp_path / "calibration.jsonl"
    file.write_text(calibration_line("gemm_share", 0.5, "of the peak", "products", None, "cpu", 2))
    with pytest.raises(ConfigError, match="site=h100x8, a cuda"):
        read_machine(configured().site, file)
    assert read_machine(configured("site=cpu").site, file).site.gemm_share == 0.5
    file.write_text(
        calibration_line("gemm_share", 0.5, "of the peak", "products", None, "NVIDIA A100-SXM4-80GB", 8)
    )
    cfg = configured("+exp=qwen3_1m", "model.architecture.num_hidden_layers=2")
    other, same = read_machine(cfg.site, file), read_machine(configured("site=a100x8").site, file)
    assert any("NVIDIA A100-SXM4-80GB" in text for text in plan(cfg, 8, other).assumptions)
    assert same.remarks == () and "A100" in same.sources["gemm_share"]


@pytest.mark.parametrize(
    "text", ["", json.dumps({"constant": "step_s", "value": 4.0}), '{"constant": ["x"]}']
)
def test_a_file_without_a_constant_is_said_to_change_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.jsonl"
    file.write_text(text)
    cfg = configured("+exp=qwen3_1m", "model.architecture.num_hidden_layers=2")
    found = plan(cfg, 8, read_machine(cfg.site, file))
    assert any("no constant" in text for text in found.assumptions)


def test_what_a_step_time_leaves_out_is_said() -> None:
    overrides = ["+exp=qwen3_4b_256k", "memory.spill_folder=/tmp", "memory.host_gib=1"]
    cfg = configured(*overrides, "site.disk_gb_s=null", "site.host_memory_gb_s=null")
    told = " ".join(plan(cfg, 1, read_machine(cfg.site)).not_modelled)
    assert "site.disk_gb_s is not known" in told and "site.host_memory_gb_s is not known" in told
    cfg = configured(*overrides)
    assert "leaves it out" not in " ".join(plan(cfg, 1, read_machine(cfg.site)).not_modelled)


def test_each_micro_batch_waits_for_the_disk() -> None:
    def waits(accumulation: int) -> float:
        cfg = configured(
            "+exp=qwen3_4b_256k",
            *("memory.spill_folder=/tmp", "memory.host_gib=1", "site.disk_gb_s=0.1"),
            f"engine.accumulation={accumulation}",
        )
        return plan(cfg, 1, read_machine(cfg.site)).time.parts["offload"]

    once = waits(1)
    assert once > 0 and waits(3) == pytest.approx(3 * once)


@pytest.mark.parametrize("text", ["{not json", "[1, 2]"])
def test_a_damaged_calibration_is_refused_by_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.jsonl"
    file.write_text(json.dumps({"constant": "context_gib", "value": 1}) + "\n" + text + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_machine(configured().site, file)
    with pytest.raises(ConfigError, match="calibration="):
        read_machine(configured().site, tmp_path / "none.jsonl")
