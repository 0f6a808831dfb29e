"""From scratch: by the model's own rule, the same values for any number of ranks, any stage, any type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stack.errors import ModelError
from stack.models.build import build_model
from stack.models.init import check_rule, module_seed
from tests.unit.models_rig import FAMILIES, scratch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "qwen3_moe", "mixtral"])
def test_spread_of_the_initial_values(family: str, dtype: torch.dtype) -> None:
    cfg = scratch(family, hidden_size=64, head_dim=16, intermediate_size=128, vocab_size=512)
    if family == "mixtral":
        cfg.architecture.pop("head_dim")
    model = build_model(cfg, 32, dtype, seed=0).model
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            few = parameter.numel() < 1000  # a router
            assert parameter.float().std().item() == pytest.approx(0.02, rel=0.3 if few else 0.1), name
            assert abs(parameter.float().mean().item()) < (0.003 if few else 0.001), name
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_the_first_loss_is_that_of_guessing() -> None:
    model: Any = build_model(scratch(), 32, torch.float32, seed=0).model
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(4.16, abs=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_depend_on_seed_and_name_alone(family: str) -> None:
    torch.manual_seed(1)
    first = build_model(scratch(family), 32, torch.float32, seed=5).model.state_dict()
    torch.manual_seed(2)
    rng = torch.get_rng_state()
    # A reader or not, sharded or not, deeper or not: the same values.
    deeper = scratch(family, num_hidden_layers=3)
    deeper.architecture.pop("layer_types", None)
    second = build_model(deeper, 32, torch.float32, 5, lambda module: None, reads_weights=False)
    assert torch.equal(rng, torch.get_rng_state())
    other = build_model(scratch(family), 32, torch.float32, seed=6).model.state_dict()
    for name, value in first.items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not torch.equal(
        first["model.layers.0.self_attn.q_proj.weight"], first["model.layers.1.self_attn.q_proj.weight"]
    )


def test_bf16_values_are_the_rounded_fp32_values() -> None:
    wide = build_model(scratch("qwen3_moe"), 32, torch.float32, seed=5).model.state_dict()
    narrow = build_model(scratch("qwen3_moe"), 32, torch.bfloat16, seed=5).model.state_dict()
    assert all(torch.equal(value.bfloat16(), narrow[name]) for name, value in wide.items())


def test_the_padding_row_is_zero_as_in_transformers() -> None:
    model: Any = build_model(scratch(pad_token_id=3), 32, torch.float32, seed=0).model
    rows = model.get_input_embeddings().weight.abs().sum(dim=1)
    assert rows[3] == 0 and rows[2] > 0


def test_seeds_of_modules_do_not_collide() -> None:
    seeds = {module_seed(seed, f"layers.{index}") for seed in range(3) for index in range(100)}
    assert len(seeds) == 300


def test_a_rule_that_leaves_a_parameter_undefined_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**scratch().architecture))
        model.model.norm.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ModelError, match=r"model.norm.extra is not set"):
        check_rule(model)


def test_a_rule_that_sets_a_childs_parameter_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2))
    with pytest.raises(ModelError, match="not by its own module"):
        check_rule(model)
