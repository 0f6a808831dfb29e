"""The models that the parity tests train."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.reference import VOCAB

SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


def save_model(folder: str, tied: bool) -> str:
    """A Qwen3 with weights larger than a fresh model's, so that attention is not uniform."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", tie_word_embeddings=tied, **SHAPE))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[bool, str]:
    """A tied and an untied one."""
    base = tmp_path_factory.mktemp("models")
    return {tied: save_model(str(base / f"tied-{tied}"), tied) for tied in (False, True)}
