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

LENGTHS = (1, 2, 3, 5, 7, 9, 16)
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


def lean(tile: int, heads: int) -> MemoryConfig:
    return MemoryConfig(
        lean=True, tiled_loss=True, loss_tile=tile, mlp_tile=tile, attention_heads=heads, offload=True
    )


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
    for stage in (2, 3):
        for tile in TILES:
            for layout in ("dp2", "sp2"):
                cfg = replace(
                    config_of(ParityCase(layout, stage, 1, "all", False, ""), folders[False]),
                    memory=levers(tile),
                )
                # Neighbours in this list go to different data-parallel ranks: their tile counts differ.
                steps = [rows_of(list(LENGTHS), 1), rows_of([16, 2], 2)]
                table[f"{stage} {tile} {layout}"] = (cfg, steps, [0.1] * 2)
                table[f"lean {stage} {tile} {layout}"] = (
                    replace(cfg, memory=lean(tile, 1)),
                    steps,
                    [0.1] * 2,
                )
    for name, folder in families.items():
        for layout in ("dp2", "sp2"):
            cfg = config_of(ParityCase(layout, 3, 1, "all", False, "packed"), folder)
            table[f"{name} {layout}"] = (cfg, make_steps("packed")[:2], [0.1] * 2)
            table[f"lean {name} {layout}"] = (replace(cfg, memory=lean(4, 0)), *table[f"{name} {layout}"][1:])
    for stage in (1, 2, 3):
        cfg = config_of(ParityCase("sp2", stage, 1, "all", False, "packed"), folders[False], precision="bf16")
        table[f"bf16 {stage}"] = (cfg, make_steps("packed")[:5], [0.1] * 5)
    return run_ranks(steps_side.many, 2, table, init=False)[0]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", ["dp2", "sp2"])
@pytest.mark.parametrize("layer", ["", "lean "])
def test_short_rows_and_ranks_of_different_lengths(runs, folders, stage, tile, layout, layer):
    steps = [rows_of(list(LENGTHS), 1), rows_of([16, 2], 2)]
    want = reference.train(reference.load(folders[False]), steps, [0.1] * 2)
    got = runs[f"{layer}{stage} {tile} {layout}"][1:]
    assert [step.loss for step in got] == pytest.approx(want.losses, rel=1e-6)
    assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", ["dp2", "sp2"])
@pytest.mark.parametrize("layer", ["", "lean "])
def test_model_families(runs, families, name, layout, layer):
    """gemma2 has a norm behind its MLP, so its lean run is the generic levers."""
    want = reference.train(reference.load(families[name]), make_steps("packed")[:2], [0.1] * 2)
    got = runs[f"{layer}{name} {layout}"][1:]
    assert [step.loss for step in got] == pytest.approx(want.losses, rel=2e-6)
    assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=2e-5)


def test_bf16_follows_fp32_at_every_stage(runs, folders):
    want = reference.train(reference.load(folders[False]), make_steps("packed")[:5], [0.1] * 5)
    for stage in (1, 2, 3):
        got = runs[f"bf16 {stage}"][1:]
        assert [step.loss for step in got] == pytest.approx(want.losses, rel=1e-2), stage
        assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=5e-2), stage


@pytest.mark.parametrize("layer", ["all", "lean"])
def test_query_heads_that_straddle_key_value_heads(tmp_path, layer):
    """6 query and 2 key/value heads on 3 ranks: the middle rank reads both, the others one."""
    torch.manual_seed(5)
    shape = SHAPE | dict(num_attention_heads=6, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape)).save_pretrained(tmp_path)
    cfg = config_of(ParityCase("1", 3, 1, "all", False, "packed"), str(tmp_path))
    cfg = replace(
        cfg, parallel=replace(cfg.parallel, sp=3), memory=levers(4) if layer == "all" else lean(4, 1)
    )
    got = run_ranks(steps_side.run_steps, 3, cfg, make_steps("packed")[:2], [0.1] * 2, init=False)
    want = reference.train(reference.load(str(tmp_path)), make_steps("packed")[:2], [0.1] * 2)
    assert [step.loss for step in got[0][1:]] == pytest.approx(want.losses, rel=1e-6)
    assert [step.result.grad_norm for step in got[0][1:]] == pytest.approx(want.norms, rel=1e-5)
