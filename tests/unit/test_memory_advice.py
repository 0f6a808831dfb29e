"""Out of memory: which errors that is, and the levers with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stack.config.schema import DataConfig, EngineConfig, MemoryConfig, ParallelConfig, RunConfig
from stack.models.spec import ModelSpec
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
    assert found["memory=lean"] == pytest.approx(36 * TOKENS * 2 * (layer - 4096))
    assert found["memory.tiled_loss=true"] == pytest.approx(12 * 151936 * (TOKENS - 4096))
    assert max(found, key=lambda change: found[change]) == "memory=lean"


def test_with_all_levers_smaller_tiles_and_the_optimizer_are_left() -> None:
    lean = {"lean": True, "tiled_loss": True, "tiled_mlp": True, "checkpointing": "full", "offload": True}
    found = levers(config(lean))
    assert found == {
        "memory.loss_tile=1024": pytest.approx(0.75 * 12 * 151936 * 4096),
        "memory.mlp_tile=8192": pytest.approx(0.75 * 6 * 2 * 12288 * 32768),
        "engine.offload_optimizer=cpu": pytest.approx(12 * 8e9 / 8),
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


def test_on_the_cpu_nothing_is_moved_to_host_memory() -> None:
    assert "engine.offload_optimizer=cpu" not in levers(config({}), device="cpu")


def test_host_memory_beside_a_device_is_what_was_moved_there() -> None:
    cfg = config({"checkpointing": "full", "offload": True}, offload_optimizer="cpu")
    found = {lever.change: lever.saves_bytes for lever in host_levers(cfg, SPEC, 8)}
    assert found == {
        "memory.offload=false": pytest.approx(36 * TOKENS * 4096 * 2),
        "engine.offload_optimizer=none": pytest.approx(12e9),
    }
    assert "memory.offload=false (about 36.0 GiB a rank)" in advise_host(cfg, SPEC, 8, "cuda")
    assert "no setting that is left" in advise_host(config({}), SPEC, 8, "cuda")


def real_cpu_error() -> BaseException:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


def test_real_errors_are_known_and_others_let_pass() -> None:
    assert is_shortage(real_cpu_error())
    assert is_shortage(MemoryError()) and is_shortage(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_shortage(RuntimeError("shapes differ")) and not is_shortage(ValueError("memory"))


def test_message_has_the_reason_and_the_strongest_lever_first() -> None:
    cfg = config({})
    told = str(explain(torch.OutOfMemoryError("CUDA out of memory. Tried 5 GiB"), cfg, SPEC, 8, "cuda"))
    assert told.startswith(
        "out of device memory: CUDA out of memory. Tried 5 GiB\nFix: memory=lean (about 594.0"
    )
    assert "estimates" in told
    assert str(explain(real_cpu_error(), cfg, SPEC, 8, "cuda")).startswith("out of host memory: ")
