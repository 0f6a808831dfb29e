"""Numbers that follow from the settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stack.config import derive
from stack.config.schema import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
)

PLAIN = {"max_position_embeddings": 64}
YARN = {"max_position_embeddings": 256} | {
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
}
LLAMA3 = {"max_position_embeddings": 128} | {
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
}


@pytest.mark.parametrize(
    ("fields", "rope", "original", "reach"),
    [
        (PLAIN, RopeConfig(), 64, 64),
        (PLAIN, RopeConfig(scaling="none"), 64, 64),
        (PLAIN, RopeConfig(scaling="yarn"), 64, 200),  # the factor follows from the row
        (PLAIN, RopeConfig(scaling="yarn", factor=2.5), 64, 160),
        (PLAIN, RopeConfig(scaling="linear", factor=2, original_length=32), 32, 64),
        (YARN, RopeConfig(), 64, 256),
        (YARN, RopeConfig(scaling="none"), 64, 64),
        (YARN, RopeConfig(scaling="yarn", factor=8), 64, 512),
        (LLAMA3, RopeConfig(), 64, 128),  # its factor is not a multiple of the length
        ({}, RopeConfig(scaling="yarn"), None, None),
        ({}, RopeConfig(scaling="yarn", factor=2, original_length=32), 32, 64),
    ],
)
def test_reach_of_positions(fields: dict, rope: RopeConfig, original: int | None, reach: int | None) -> None:
    model = ModelConfig(architecture=fields, rope=rope)
    assert derive.original_length(model) == original
    assert derive.reach(model, seq_len=200) == reach


def test_the_config_of_a_model_folder_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 7}))
    model = ModelConfig(path=str(tmp_path), architecture=PLAIN)
    assert derive.original_length(model) == 7
    assert derive.original_length(ModelConfig(path="no/such-model", architecture=PLAIN)) == 64


def test_theta_is_found_in_both_layouts() -> None:
    old = derive.rope_parameters({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}})
    new = derive.rope_parameters({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})
    assert (old["rope_theta"], old["rope_type"]) == (5.0, "linear")
    assert (new["rope_theta"], new["rope_type"]) == (5.0, "default")


def test_rows_and_lengths() -> None:
    cfg = RunConfig(parallel=ParallelConfig(sp=2), engine=EngineConfig(accumulation=3))
    cfg.data.micro_batch, cfg.data.seq_len = 5, 15
    assert derive.data_parallel(cfg.parallel, 8) == 4
    assert derive.rows_per_step(cfg, 8) == 5 * 3 * 4
    assert derive.seq_local(cfg.data, cfg.parallel) == 8
    assert derive.run_folder(RunConfig(name="a", out="b")) == Path("b/a")


@pytest.mark.parametrize(
    ("schedule", "total", "decay"),
    [
        (ScheduleConfig(steps=95), 95, 9),
        (ScheduleConfig(steps=5), 5, 1),
        (ScheduleConfig(epochs=2, decay_steps=4), 14, 4),
    ],
)
def test_lengths_of_a_run(schedule: ScheduleConfig, total: int, decay: int) -> None:
    assert derive.total_steps(schedule, steps_per_epoch=7) == total
    assert derive.decay_steps(schedule, total) == decay


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (EngineConfig(stage=1), "zero1"),
        (EngineConfig(stage=2, offload_optimizer="cpu"), "zero2"),
        (EngineConfig(stage=3), "zero3"),
        (EngineConfig(stage=3, offload_optimizer="cpu"), "zero3_offload_optimizer"),
        (EngineConfig(stage=3, offload_optimizer="cpu", offload_param="cpu"), "zero3_offload_all"),
        (EngineConfig(stage=3, offload_optimizer="nvme", offload_param="cpu"), "zero3_nvme"),
    ],
)
def test_the_deepspeed_file_follows_the_stage(engine: EngineConfig, name: str) -> None:
    file = derive.ds_config_file(engine)
    assert file is not None and file.stem == name and file.is_file()


def test_a_deepspeed_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = EngineConfig(ds_config="ds_configs/zero1.json")
    assert derive.ds_config_file(engine) == derive.REPO_ROOT / "ds_configs/zero1.json"
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/zero1.json").write_text("{}")
    assert derive.ds_config_file(engine) == Path("ds_configs/zero1.json")
    assert derive.ds_config_file(EngineConfig(stage=0)) is None
