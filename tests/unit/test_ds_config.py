"""The final DeepSpeed settings: what Hydra owns, what a file or an override may say, what is never left open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stack.config.compose import CONF, compose_config
from stack.config.derive import REPO_ROOT
from stack.config.schema import EngineConfig, RunConfig
from stack.engine.ds_config import AUTO, REASONS, build_ds_config
from stack.errors import ConfigError, Fault

FILES = ("zero1", "zero2", "zero3", "zero3_offload_optimizer", "zero3_offload_all", "zero3_nvme")


def _cfg(**engine: Any) -> RunConfig:
    cfg = RunConfig(engine=EngineConfig(**engine))
    cfg.data.micro_batch, cfg.parallel.sp = 3, 2
    return cfg


def _faults(cfg: RunConfig) -> list[Fault]:
    with pytest.raises(ConfigError) as caught:
        build_ds_config(cfg, world=4)
    return caught.value.faults


def _strings(tree: Any) -> Iterator[str]:
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else [tree]:
        yield from _strings(value) if isinstance(value, dict | list) else [value]


def test_the_files_are_the_ones_of_the_layout() -> None:
    assert {path.stem for path in (REPO_ROOT / "ds_configs").iterdir()} == set(FILES)
    for name in FILES:
        content = json.loads((REPO_ROOT / "ds_configs" / f"{name}.json").read_text())
        assert content[REASONS] and content["zero_optimization"]["stage"] == AUTO


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_what_is_always_written(stage: Any, precision: Any) -> None:
    cfg = _cfg(stage=stage, precision=precision, accumulation=5)
    final = build_ds_config(cfg, world=4)
    # DeepSpeed is told of one micro-batch a step and of nothing that is parallel in the sequence.
    assert final["train_micro_batch_size_per_gpu"] == 3
    assert final["gradient_accumulation_steps"] == 1
    assert final["managed_gradient_accumulation"] is False
    assert not {"train_batch_size", "sequence_parallel_size", "optimizer", "scheduler", REASONS} & set(final)
    assert final["zero_optimization"]["stage"] == stage
    assert (final["bf16"]["enabled"], final["fp16"]["enabled"]) == (precision == "bf16", precision == "fp16")
    assert final.get("data_types", {}).get("grad_accum_dtype") == ("fp32" if stage else None)
    assert final["communication_data_type"] == "fp32"
    assert final["zero_allow_untested_optimizer"] is True and final["zero_force_ds_cpu_optimizer"] is False
    assert final["steps_per_print"] > 10**6 and final["wall_clock_breakdown"] is False
    assert not {"offload_optimizer", "offload_param"} & set(final["zero_optimization"])
    assert AUTO not in list(_strings(final))
    json.dumps(final)


@pytest.mark.parametrize(
    ("engine", "clip", "written"),
    [
        ({}, 0.0, 0.0),
        ({}, 0.5, 0.5),
        ({"stage": 0}, 0.5, 0.5),
        ({"stage": 0, "precision": "fp32"}, 0.5, 0.0),  # the engine clips there itself
    ],
)
def test_clipping_is_never_left_open(engine: dict[str, Any], clip: float, written: float) -> None:
    cfg = _cfg(**engine)
    cfg.optim.clip = clip
    assert build_ds_config(cfg, world=2)["gradient_clipping"] == written


@pytest.mark.parametrize("pin", [True, False])
def test_offload(pin: bool) -> None:
    cfg = _cfg(offload_optimizer="cpu", offload_param="cpu", cpu_optimizer="deepspeed")
    cfg.memory.pin_memory = pin
    final = build_ds_config(cfg, world=2)
    assert final["zero_force_ds_cpu_optimizer"] is True
    for block in ("offload_optimizer", "offload_param"):
        assert final["zero_optimization"][block] == {"device": "cpu", "pin_memory": pin}
    lower = build_ds_config(_cfg(stage=1, offload_optimizer="cpu"), world=2)
    assert lower["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert lower["zero_force_ds_cpu_optimizer"] is False


def test_each_run_has_a_folder_of_its_own_on_the_disk(tmp_path: Path) -> None:
    """DeepSpeed names the files alike in all runs."""
    found = set()
    for out, name in (("a", "one"), ("a", "two"), ("b", "two")):
        cfg = _cfg(offload_optimizer="nvme", offload_param="cpu", nvme_path="/disk")
        cfg.out, cfg.name = str(tmp_path / out), name
        zero = build_ds_config(cfg, 2)["zero_optimization"]
        assert "nvme_path" not in zero["offload_param"]
        found.add(zero["offload_optimizer"]["nvme_path"])
    assert len(found) == 3 and {Path(folder).parent for folder in found} == {Path("/disk")}


# DeepSpeed settings of a user's file -> the Hydra setting that they disagree with, or None where they agree.
# The run: micro_batch 3, sp 2, accumulation 5, 4 ranks, stage 3, bf16, AdamW with the defaults of the schema.
AGREEMENT: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"train_micro_batch_size_per_gpu": "auto"}, None),
    ({"train_micro_batch_size_per_gpu": 3}, None),
    ({"train_micro_batch_size_per_gpu": 1}, "data.micro_batch"),
    ({"gradient_accumulation_steps": 5}, None),
    ({"gradient_accumulation_steps": 1}, "engine.accumulation"),
    ({"train_batch_size": 30}, None),
    ({"train_batch_size": 60}, "engine.accumulation"),
    ({"gradient_clipping": 1}, None),
    ({"gradient_clipping": 0.5}, "optim.clip"),
    ({"bf16": {"enabled": True}}, None),
    ({"bf16": {"enabled": False}}, "engine.precision"),
    ({"bf16": {"enabled": 1}}, "engine.precision"),
    ({"bf16": True}, "a section"),
    ({"fp16": {"enabled": "auto", "loss_scale_window": 100}}, None),
    ({"fp16": {"enabled": True}}, "engine.precision"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "engine.precision"),
    ({"zero_optimization": {"stage": 3}}, None),
    ({"zero_optimization": {"stage": 2}}, "engine.stage"),
    ({"zero_optimization": True}, "a section"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "engine.offload_optimizer"),
    ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, None),
    ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "engine.offload_param"),
    ({"zero_optimization": {"reduce_bucket_size": 7}}, None),
    ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "nothing in Hydra"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}}, None),
    ({"optimizer": {"type": "Lamb"}}, "optim.name"),
    ({"optimizer": {"params": {"lr": 0.1}}}, "optim.lr"),
    ({"optimizer": {"params": {"weight_decay": 0.2}}}, "optim.weight_decay"),
    ({"optimizer": {"params": {"momentum": 0.9}}}, "optim"),
    ({"scheduler": {"type": "auto", "params": {"warmup_num_steps": "auto"}}}, None),
    ({"scheduler": {"type": "WarmupLR"}}, "schedule"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, "memory.checkpointing"),
    ({"sequence_parallel_size": 2}, None),
    ({"sequence_parallel_size": 4}, "parallel.sp"),
    ({"managed_gradient_accumulation": True}, "engine"),
    ({"prescale_gradients": True}, "engine"),
    ({"gradient_predivide_factor": 2.0}, "engine"),
    ({"gradient_allreduce_op": "sum"}, "engine"),
    ({"wandb": {"enabled": True}}, "log.wandb"),
    ({"torch_autocast": {"enabled": True}}, "engine.precision"),
]


@pytest.mark.parametrize(("content", "owner"), AGREEMENT, ids=[json.dumps(row[0]) for row in AGREEMENT])
def test_a_file_agrees_or_is_refused(content: dict[str, Any], owner: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(content))
    cfg = _cfg(accumulation=5, ds_config=str(file))
    if owner is None:
        final = build_ds_config(cfg, world=4)
        assert final["gradient_accumulation_steps"] == 1 and AUTO not in list(_strings(final))
        assert not {"optimizer", "scheduler", "train_batch_size"} & set(final)
        return
    (fault,) = _faults(cfg)
    assert str(file) in fault.key and owner in f"{fault.want} {fault.fix}"


def test_every_disagreement_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps({"gradient_clipping": 3, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True}})
    )
    cfg = _cfg(ds_config=str(file), overrides={"gradient_clipping": 1.0})
    assert len(_faults(cfg)) == 4


@pytest.mark.parametrize(
    ("overrides", "owner"),
    [
        ({"zero_optimization": {"stage": 3}}, "engine.stage"),  # owned, even where it agrees
        ({"gradient_clipping": 1.0}, "optim.clip"),
        ({"train_batch_size": 8}, "engine.accumulation"),
        ({"optimizer": {"type": "AdamW"}}, "optim.name"),
        ({"optimizer": {"other": 1}}, "optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "schedule"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "engine.offload_param"),
        ({"bf16": True}, "with its value"),
        ({"zero_optimization": {"sub_group_size": "auto"}}, "give the value"),
        (
            {"zero_optimization": {"reduce_scatter": False, "contiguous_gradients": False}},
            "one of reduce_scatter",
        ),
    ],
)
def test_overrides_that_are_refused(overrides: dict[str, Any], owner: str) -> None:
    (fault,) = _faults(_cfg(overrides=overrides))
    assert owner in str(fault)


def test_overrides_win_over_the_file() -> None:
    overrides = {
        "zero_optimization": {"reduce_bucket_size": 7, "contiguous_gradients": False},
        "new": {"thing": [1]},
    }
    final = build_ds_config(_cfg(overrides=overrides), world=4)
    assert final["zero_optimization"]["reduce_bucket_size"] == 7
    assert final["zero_optimization"]["contiguous_gradients"] is False
    assert final["new"] == {"thing": [1]}
    assert overrides["new"] is not final["new"]


def test_a_part_of_the_optimizer_cannot_stay_on_the_device() -> None:
    for ratio in (1.0, 0.5):
        overrides = {"zero_optimization": {"offload_optimizer": {"ratio": ratio}}}
        cfg = _cfg(stage=3, offload_optimizer="cpu", overrides=overrides)
        if ratio == 1:
            assert build_ds_config(cfg, 4)["zero_optimization"]["offload_optimizer"]["ratio"] == 1
        else:
            assert [fault.key for fault in _faults(cfg)] == ["zero_optimization.offload_optimizer.ratio"]


def test_overlap_below_stage_2_is_refused_before_deepspeed_does() -> None:
    overlap = {"zero_optimization": {"overlap_comm": True}}
    assert build_ds_config(_cfg(stage=2, overrides=overlap), 4)["zero_optimization"]["overlap_comm"] is True
    assert "below stage 2" in _faults(_cfg(stage=1, overrides=overlap))[0].want


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        ({"gradient_cliping": 0.1}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
        (
            {"zero_optimization": {"reduce_buket_size": 5}},
            "zero_optimization.reduce_buket_size",
            "reduce_bucket_size",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "big"}},
            "zero_optimization.reduce_bucket_size",
            "integer",
        ),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            "zero_optimization.round_robin_gradients",
            "wrong",
        ),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "zero_optimization.cpu_offload",
            "engine.offload_optimizer=cpu",
        ),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow", "scrambles"),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 2}},
            "zero_optimization.zero_hpz_partition_size",
            "leave it",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", "parallel.sp"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "tensor_parallel.tp.tp_size", "parallel.sp"),
        ({"expert_parallel": {"autoep_size": 2}}, "expert_parallel.autoep_size", "parallel.sp"),
        ({"amp": {"enabled": True}}, "amp", "removed"),
        (
            {"zero_optimization": {"stage3_max_live_parametres": 5}},
            "zero_optimization.stage3_max_live_parametres",
            "stage3_max_live_parameters, or",
        ),
        (
            {"zero_optimization": {"round_robin_gradients": 1}},
            "zero_optimization.round_robin_gradients",
            "wrong",
        ),
    ],
)
def test_what_deepspeed_ignores_or_stops_at_late_is_told_first(
    overrides: dict[str, Any], path: str, says: str
) -> None:
    (fault,) = _faults(_cfg(stage=2, overrides=overrides))
    assert fault.key == path and says in f"{fault.want} {fault.fix}"


@pytest.mark.parametrize(
    "overrides",
    [
        {
            "zero_optimization": {
                "round_robin_gradients": False,
                "zero_hpz_partition_size": 1,
            }
        },
        {"flops_profiler": {"enabled": True}, "comms_logger": {"enabled": True}, "dump_state": True},
        {"aio": {"block_size": 1048576}, "wall_clock_breakdown": True, "tensor_parallel": {"autotp_size": 1}},
        {"tensor_parallel": True, "zero_optimization": {"zenflow": None}},
        {"checkpoint": {"parallel_write": {"pipeline_stage": True}}, "my_own": 1},
    ],
)
def test_other_settings_of_deepspeed_are_let_pass(overrides: dict[str, Any]) -> None:
    build_ds_config(_cfg(overrides=overrides), 4)


def test_an_order_that_stage_3_does_not_have_is_let_pass() -> None:
    build_ds_config(_cfg(overrides={"zero_optimization": {"round_robin_gradients": True}}), 4)


@pytest.mark.parametrize("choice", [path.stem for path in sorted((CONF / "engine").glob("*.yaml"))])
def test_deepspeed_itself_accepts_the_settings(choice: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    cfg = compose_config(["+exp=quickstart", f"engine={choice}", "engine.nvme_path=/tmp"], strict=False)
    final = build_ds_config(cfg, world=2)
    read = DeepSpeedConfig(final)
    assert read.zero_config.stage == cfg.engine.stage
    assert read.gradient_clipping == (0.0 if cfg.engine.stage == 0 else cfg.optim.clip)  # fp32: see below
    assert read.managed_gradient_accumulation is False and read.gradient_accumulation_steps == 1
    unknown = set(final["zero_optimization"]) - set(_known_zero_keys())
    assert not unknown  # a misspelt setting would be ignored, or stop the run late


def _known_zero_keys() -> Iterator[str]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for name, field in DeepSpeedZeroConfig.model_fields.items():
        yield field.alias or name
