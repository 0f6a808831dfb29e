"""Out of memory: which errors that is, and the levers with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stack.config.schema import DataConfig, EngineConfig, MemoryConfig, ParallelConfig, RunConfig
from stack.models.spec import ModelSpec
from stack.train.host_room import kept_bytes
from stack.train.memory_advice import advise_host, device_levers, explain, host_levers, is_shortage

GIB = 1024**3
SPEC = ModelSpec(
    family="qwen3",
    num_layers=36,
    hidden=4096,
    intermediate=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab=151936,
    tied=False,
    num_parameters=8_000_000_000,
)  # fmt: skip
TOKENS = 131072  # of one rank: 1,048,576 over 8
LEAN = 2 * (4096 + 32 * 128) + 4 * 32  # bytes a token and layer: input, attention's output, log-sum-exp


def config(memory: dict[str, Any], **engine: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(seq_len=8 * TOKENS),
        parallel=ParallelConfig(sp=8),
        memory=MemoryConfig(**memory),
        engine=EngineConfig(**engine),
    )


def levers(cfg: RunConfig, world: int = 8, device: str = "cuda") -> dict[str, float]:
    return {lever.change: lever.saves_bytes for lever in device_levers(cfg, SPEC, world, device)}


def test_without_levers_lean_layers_help_most_then_the_tiled_loss() -> None:
    found = levers(config({}))
    layer = 6 * 4096 + (32 + 16) * 128 + 32 * 128 + 3 * 12288
    assert found["memory=lean"] == pytest.approx(36 * TOKENS * 2 * layer)  # what it keeps goes to the host
    on_cpu = levers(config({}), device="cpu")
    assert on_cpu["memory=lean"] == pytest.approx(36 * TOKENS * (2 * layer - LEAN))
    assert found["memory.tiled_loss=true"] == pytest.approx(12 * 151936 * (TOKENS - 4096))
    assert max(found, key=lambda change: found[change]) == "memory=lean"


def test_with_all_levers_smaller_tiles_and_the_optimizer_are_left() -> None:
    lean = {"lean": True, "tiled_loss": True, "tiled_mlp": True, "checkpointing": "full", "offload": True}
    found = levers(config(lean))
    assert found == {
        "memory.loss_tile=1024": pytest.approx(0.75 * 12 * 151936 * 4096),
        "memory.mlp_tile=8192": pytest.approx(0.75 * 6 * 2 * 12288 * 32768),
        "engine.offload_optimizer=cpu": pytest.approx((12 + 4) * 8e9 / 8),
    }
    small = {**lean, "loss_tile": 256, "mlp_tile": 1024}
    assert list(levers(config(small, offload_optimizer="cpu"))) == []


def test_kept_states_can_be_offloaded_and_more_ranks_shared() -> None:
    kept = {"tiled_loss": True, "tiled_mlp": True, "checkpointing": "full"}
    found = levers(config(kept), world=16)
    assert found["memory.offload=true"] == pytest.approx(36 * TOKENS * 4096 * 2)
    assert found["parallel.sp=16"] == pytest.approx(36 * TOKENS * 4096 * 2 / 2)
    assert "parallel.sp=16" not in levers(config(kept), world=8)


@pytest.mark.parametrize("stage, parts", [(0, 12 + 2 + 2), (1, 4), (2, 2), (3, 0)])
def test_higher_stage_saves_what_it_shards(stage: Any, parts: int) -> None:
    found = levers(config({}, stage=stage))
    assert found.get("engine=zero3", 0) == pytest.approx(parts * 8e9 * 7 / 8)


def test_lean_layers_that_stay_on_the_device_keep_three_tensors() -> None:
    lean = {"lean": True, "tiled_loss": True, "tiled_mlp": True, "checkpointing": "full"}
    found = levers(config(lean), world=16)
    assert found["memory.offload=true"] == pytest.approx(36 * TOKENS * LEAN)
    assert found["parallel.sp=16"] == pytest.approx(36 * TOKENS * LEAN / 2)


def test_on_the_cpu_nothing_is_moved_to_host_memory() -> None:
    assert "engine.offload_optimizer=cpu" not in levers(config({}), device="cpu")
    kept = {"tiled_loss": True, "tiled_mlp": True, "checkpointing": "full"}
    found = levers(config(kept), device="cpu")
    assert "memory.offload=true" not in found and "memory.offload=false" not in found
    # What is kept is 36 GiB; half of it stays, and the rest goes where there is no memory.
    assert found["memory=lean memory.spill_folder=FOLDER memory.host_gib=18"] == 18 * GIB


def test_device_memory_is_not_won_by_what_relieves_the_host() -> None:
    lean = {"lean": True, "checkpointing": "full", "offload": True, "tiled_loss": True, "tiled_mlp": True}
    cfg = config({**lean, "loss_tile": 256, "mlp_tile": 1024}, offload_optimizer="cpu")
    told = str(explain(torch.OutOfMemoryError("CUDA out of memory"), cfg, SPEC, 8, "cuda"))
    assert "offload" not in told and "no setting that is left" in told


def there(cfg: RunConfig, world: int = 8) -> dict[str, float]:
    return {lever.change: lever.saves_bytes for lever in host_levers(cfg, SPEC, world)}


def test_host_memory_beside_a_device_is_what_was_moved_there() -> None:
    cfg = config({"checkpointing": "full", "offload": True}, offload_optimizer="cpu")
    # fp32 weights, two moments and gradients twice.
    assert there(cfg) == {
        "memory.offload=false": 36 * GIB,
        "memory=lean memory.spill_folder=FOLDER memory.host_gib=18": 18 * GIB,
        "engine.offload_optimizer=none": pytest.approx((12 + 8) * 1e9),
    }
    assert "memory.offload=false (about 36.0 GiB a rank)" in advise_host(cfg, SPEC, 8, "cuda")
    assert "no setting that is left" in advise_host(config({}), SPEC, 8, "cuda")


def test_on_the_host_lean_layers_take_slabs_and_can_spill() -> None:
    cfg = config({"lean": True, "checkpointing": "full", "offload": True})
    layer = 16 * 2**20 * math.ceil(TOKENS * LEAN / (16 * 2**20))
    kept = 36 * layer
    assert kept == kept_bytes(cfg, SPEC, on_gpu=True).in_memory > 72 * GIB
    assert there(cfg, world=16) == {
        "memory.offload=false": kept,
        "memory.spill_folder=FOLDER memory.host_gib=37": kept - 37 * GIB,
        "memory=alst": kept - 36 * GIB,
        "parallel.sp=16": pytest.approx(kept / 2, rel=0.01),
    }
    assert "memory.spill_folder=FOLDER memory.host_gib=37 (about 35.6 GiB a rank)" in advise_host(
        cfg, SPEC, 8, "cuda"
    )


def test_a_spilling_run_can_keep_less_in_memory_down_to_three_layers() -> None:
    spilling = {"lean": True, "checkpointing": "full", "offload": True, "spill_folder": "disk"}
    found = there(config({**spilling, "host_gib": 40.0}), world=16)
    assert 38 * GIB < found["memory.offload=false"] <= 40 * GIB
    assert found["memory.host_gib=20"] == found["memory.offload=false"] - 20 * GIB
    assert "memory=alst" not in found
    layer = kept_bytes(config({**spilling, "host_gib": 40.0}), SPEC, True).layer
    fewest = math.ceil(100 * 3 * layer / GIB) / 100
    assert f"memory.host_gib={fewest:g}" in there(config({**spilling, "host_gib": 9.0}))
    assert not [change for change in there(config({**spilling, "host_gib": 6.0})) if "host_gib" in change]


def test_page_locked_checkpoints_are_counted_as_torch_rounds_them() -> None:
    cfg = config({"checkpointing": "full", "offload": True, "host_gib": None})
    cfg.data.seq_len = 8 * (TOKENS + 1)
    assert there(cfg)["memory.offload=false"] == 72 * GIB
    cfg.memory.pin_memory = False
    assert there(cfg)["memory.offload=false"] == 36 * (TOKENS + 1) * 4096 * 2


def test_fewer_rows_at_once_take_less_host_memory() -> None:
    cfg = config({"checkpointing": "full", "offload": True})
    cfg.data.micro_batch, cfg.engine.accumulation = 4, 3
    assert there(cfg)["data.micro_batch=1 engine.accumulation=12"] == (4 - 1) * 36 * GIB


def real_cpu_error() -> BaseException:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


def test_real_errors_are_known_and_others_let_pass() -> None:
    assert is_shortage(real_cpu_error())
    assert is_shortage(MemoryError()) and is_shortage(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_shortage(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"))
    assert not is_shortage(RuntimeError("shapes differ")) and not is_shortage(ValueError("memory"))


def test_message_has_the_reason_and_the_strongest_lever_first() -> None:
    cfg = config({})
    told = str(explain(torch.OutOfMemoryError("CUDA out of memory. Tried 5 GiB"), cfg, SPEC, 8, "cuda"))
    assert told.startswith(
        "out of device memory: CUDA out of memory. Tried 5 GiB\nFix: memory=lean (about 630.0"
    )
    assert "estimates" in told
    assert str(explain(real_cpu_error(), cfg, SPEC, 8, "cuda")).startswith("out of host memory: ")
