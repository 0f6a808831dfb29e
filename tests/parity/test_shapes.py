"""Awkward sizes and other model families on two ranks: short rows, more tiles than tokens, ranks of different lengths,
mixtures of experts, sliding windows, bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stack.config.schema import MemoryConfig
from tests.parity import reference, steps_side
from tests.parity.cases import ParityCase
from tests.parity.conftest import SHAPE
from tests.parity.rank_side import config_of
from tests.parity.reference import Row, make_steps
from tests.ranks import run_ranks

LENGTHS = (2, 3, 5, 7, 9, 16)
TILES = (1, 4, 8)
FAMILIES = {
    "qwen3_moe": dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "llama": {},
    "mistral": dict(sliding_window=4),
    "gemma2": dict(sliding_window=4, final_logit_softcapping=5.0, attn_logit_softcapping=None),
}


def rows_of(lengths: list[int], seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    return [Row([torch.randint(0, 64, (n,), generator=generator).tolist()], [[True] * n]) for n in lengths]


def levers(tile: int) -> MemoryConfig:
    return MemoryConfig(
        tiled_loss=True, loss_tile=tile, tiled_mlp=True, mlp_tile=tile, checkpointing="full", offload=True
    )


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, str]:
    saved = {}
    for name, extra in FAMILIES.items():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SHAPE | extra)))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.1)
        saved[name] = str(tmp_path_factory.mktemp("families") / name)
        model.save_pretrained(saved[name])
    return saved


@pytest.fixture(scope="module")
def runs(folders, families):
    """All runs of this file on one start of two ranks."""
    table: dict[str, tuple] = {}
    for stage in (0, 2, 3):
        for tile in TILES:
            for layout in ("dp2", "sp2"):
                cfg = replace(
                    config_of(ParityCase(layout, stage, 1, "all", False, ""), folders[False]),
                    memory=levers(tile),
                )
                # Neighbours in this list go to different data-parallel ranks: their tile counts differ.
                table[f"{stage} {tile} {layout}"] = (
                    cfg,
                    [rows_of(list(LENGTHS), 1), rows_of([16, 2], 2)],
                    [0.1] * 2,
                )
    for name, folder in families.items():
        for layout in ("dp2", "sp2"):
            cfg = config_of(ParityCase(layout, 3, 1, "all", False, "packed"), folder)
            table[f"{name} {layout}"] = (cfg, make_steps("packed")[:2], [0.1] * 2)
    for stage in (1, 2, 3):
        cfg = config_of(ParityCase("sp2", stage, 1, "all", False, "packed"), folders[False], precision="bf16")
        table[f"bf16 {stage}"] = (cfg, make_steps("packed")[:5], [0.1] * 5)
    return run_ranks(steps_side.many, 2, table, timeout_s=590, init=False)[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", ["dp2", "sp2"])
def test_short_rows_and_ranks_of_different_lengths(runs, folders, stage, tile, layout):
    steps = [rows_of(list(LENGTHS), 1), rows_of([16, 2], 2)]
    want = reference.train(reference.load(folders[False]), steps, [0.1] * 2)
    got = runs[f"{stage} {tile} {layout}"][1:]
    assert [step.loss for step in got] == pytest.approx(want.losses, rel=1e-6)
    assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", ["dp2", "sp2"])
def test_model_families(runs, families, name, layout):
    want = reference.train(reference.load(families[name]), make_steps("packed")[:2], [0.1] * 2)
    got = runs[f"{name} {layout}"][1:]
    assert [step.loss for step in got] == pytest.approx(want.losses, rel=2e-6)
    assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=2e-5)


def test_bf16_follows_fp32_at_every_stage(runs, folders):
    want = reference.train(reference.load(folders[False]), make_steps("packed")[:5], [0.1] * 5)
    for stage in (1, 2, 3):
        got = runs[f"bf16 {stage}"][1:]
        assert [step.loss for step in got] == pytest.approx(want.losses, rel=1e-2), stage
        assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=5e-2), stage
