"""Where the parts of a model sit, by family.

Almost every Hugging Face decoder uses the names of `DEFAULT`, so a new family usually needs no entry. One that differs
gets one line in `FAMILIES`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeanNames:
    """Parts of a block that is x + attention(norm(x)), then x + mlp(norm(x)), and nothing else.

    Only a family whose lean block has been compared with its own (`tests/contract`) has an entry.
    """

    input_norm: str = "input_layernorm"
    out_proj: str = "o_proj"
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"


@dataclass(frozen=True)
class Family:
    """Attribute names inside a model: the list of blocks in the body, the norm behind them, and the two halves of a block."""

    blocks: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    mlp: str = "mlp"
    lean: LeanNames | None = None
    """Set where the lean layer (`parallel/lean.py`) may take the block apart."""


DEFAULT = Family()

FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(attention="attention", final_norm="final_layer_norm"),
    **{name: Family(lean=LeanNames()) for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")},
}
"""By `model_type` of the Hugging Face config."""


def family_of(model_type: str) -> Family:
    """The names for `model_type`, those of most decoders if the family is not listed."""
    return FAMILIES.get(model_type, DEFAULT)
