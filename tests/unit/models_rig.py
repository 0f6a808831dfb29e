"""Small models for the tests of stack/models: one of each family, as settings and as a saved folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stack.config.schema import ModelConfig, RopeConfig

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
BASE: dict[str, Any] = {
    **SMALL,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"logits_scaling": 8.0},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "pad_token_id": 0,
    },
}


def architecture(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """Fields of a Hugging Face config, with model_type."""
    fields = copy.deepcopy(BASE | FAMILIES[family])
    if family in ("qwen2", "mixtral", "granite"):
        fields.pop("head_dim")
    if family == "gemma3_text":
        # Its positions are given for each kind of layer.
        fields.pop("rope_theta")
    return {"model_type": family} | fields | changes


def scratch(family: str = "qwen3", rope: RopeConfig | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig(
        init="scratch", architecture=architecture(family, **changes), rope=rope or RopeConfig()
    )


def pretrained(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), init="pretrained", **settings)


def plain_model(family: str, dtype: torch.dtype, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model made by transformers alone, with norms and biases moved off their initial values."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**architecture(family, **changes)), dtype=dtype
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def saved(folder: Path, family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    plain_model(family, dtype, **changes).save_pretrained(folder)
    return folder


def logits(model: torch.nn.Module, length: int = 12) -> torch.Tensor:
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits
