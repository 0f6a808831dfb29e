"""A model's numbers from its config alone, without building it: what the forecast multiplies.

Only families whose blocks are norm, attention, residual, norm, MLP or experts, residual are known; of others nothing is
guessed. `tests/unit/test_plan_shape.py` compares all ready models with the built ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from stack.config import derive
from stack.config.model_checks import FIELDS, architecture_faults, field_fault, is_count
from stack.config.schema import ModelConfig
from stack.errors import ConfigError, Fault
from stack.models.registry import family_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type`s whose forward is written down in layers.py."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Names as in `stack.models.spec.ModelSpec`; counts in elements."""

    family: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    head_norms: bool
    """q and k are normed head by head."""
    attention_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    windows: tuple[int | None, ...] = ()
    frozen: tuple[str, ...] = ()
    """Patterns of `model.freeze`."""
    layer: tuple[tuple[str, int, int], ...] = field(default=())
    """(name, elements, axes) of each parameter of a block, in the model's order."""

    @property
    def attention_weights(self) -> int:
        return self.num_layers * sum(n for name, n, axes in self.layer if "self_attn" in name and axes > 1)

    @property
    def mlp_weights(self) -> int:
        """What one token meets."""
        share = self.experts_per_token / self.num_experts if self.num_experts else 1
        parts = [(name, n) for name, n, axes in self.layer if name.startswith("mlp.") and axes > 1]
        return round(self.num_layers * sum(n * (share if "experts" in name else 1) for name, n in parts))

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        return sum(n for _, n, _ in self.layer)

    @property
    def num_parameters(self) -> int:
        outside = self.head_weights * (1 if self.tied else 2) + self.hidden
        return self.num_layers * self.layer_parameters + outside

    @property
    def lean(self) -> bool:
        """Whether the lean layer may take its blocks apart."""
        return family_of(self.family).lean is not None

    def is_trained(self, name: str) -> bool:
        """name: of a parameter as in the model, such as `model.layers.0.mlp.up_proj.weight`."""
        names = [name, "lm_head.weight"] if self.tied and name == EMBEDDING else [name]
        return not any(fnmatchcase(one, pattern) for one in names for pattern in self.frozen)


EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def read_shape(model: ModelConfig) -> Shape:
    """From the folder's config, else from `model.architecture`. Raises ConfigError for a model that is not known."""
    fields = derive.architecture(model)
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ConfigError([_unknown(model, fields)])
    if any(fields.get(name) for name in ("mlp_only_layers", "attention_dropout")) or (
        fields.get("decoder_sparse_step", 1) != 1
    ):
        want = "layers that are all alike, without attention dropout"
        fix = "python launch/plan.py exact=true ..., which runs the model itself"
        raise ConfigError([Fault("model.architecture", family, want, fix)])
    if faults := _faults(model, fields):
        raise ConfigError(faults)
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    head_norms = family.startswith("qwen3")
    shape = Shape(
        family=family,
        num_layers=fields["num_hidden_layers"],
        hidden=hidden,
        intermediate=fields["moe_intermediate_size" if fields.get("num_experts") else "intermediate_size"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim", HEAD_DIMS.get(fields["model_type"])) or hidden // heads,
        vocab=fields["vocab_size"],
        tied=fields.get("tie_word_embeddings", False),
        head_norms=head_norms,
        attention_bias=family == "qwen2" or bool(fields.get("attention_bias")),
        num_experts=fields.get("num_experts") or 0,
        experts_per_token=fields.get("num_experts_per_tok") or 0,
        windows=_windows(fields),
        frozen=tuple(model.freeze),
    )
    return _with_layer(shape, bool(fields.get("mlp_bias")), family == "qwen2")


def _unknown(model: ModelConfig, fields: dict[str, Any]) -> Fault:
    if not fields:
        want = "a config that can be read here: a model of conf/model, or a folder"
        return Fault("model.path", model.path, want, "download the model, or give model.architecture")
    want = f"one of {', '.join(FAMILIES)}: other families are not modelled by the closed form"
    fix = "python launch/plan.py exact=true ..., which runs the model itself"
    return Fault("model.architecture.model_type", fields.get("model_type"), want, fix)


HEAD_DIMS = {"qwen3": 128}
"""By `model_type`, where transformers does not divide the hidden size by the heads if the config says nothing."""

EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
"""What a model with experts has to say, with an example."""


def _faults(model: ModelConfig, fields: dict[str, Any]) -> list[Fault]:
    """Fields that are left out, whose defaults only transformers knows, or that cannot be counted with."""
    found = list(architecture_faults(model))
    experts, width = bool(fields.get("num_experts")), fields.get("intermediate_size")
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
    for name in needed if experts else [*needed, "intermediate_size"]:
        if name not in fields:
            want = "a whole number above 0, which the forecast needs"
            found.append(field_fault(model, name, None, want, FIELDS[name][1]))
    for name, example in EXPERTS.items() if experts else ():
        if not is_count(fields.get(name)):
            found.append(field_fault(model, name, fields.get(name), "a whole number above 0", example))
    if isinstance(width, list) and not experts:
        found.append(field_fault(model, "intermediate_size", width, "one number, as layers are alike", 12288))
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    dim = fields.get("head_dim", HEAD_DIMS.get(str(fields.get("model_type"))))
    if not dim and is_count(heads) and is_count(hidden) and hidden % heads:
        want = f"a multiple of the {heads} attention heads, as no head_dim is given"
        found.append(field_fault(model, "hidden_size", hidden, want, heads * 64))
    for name, example in (("sliding_window", 4096), ("max_window_layers", 28)):
        if not (fields.get(name) in (None, 0) or is_count(fields[name])):
            found.append(field_fault(model, name, fields[name], "a whole number", example))
    return found


def _windows(fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Sliding windows by layer, as transformers reads them."""
    layers, window = fields["num_hidden_layers"], fields.get("sliding_window")
    if fields["model_type"] in ("llama",) or not window:
        return (None,) * layers
    if fields["model_type"] == "mistral":
        return (window,) * layers
    if not fields.get("use_sliding_window"):
        return (None,) * layers
    first = fields["max_window_layers"] if fields.get("max_window_layers") is not None else 28
    return tuple(window if layer >= first else None for layer in range(layers))


def _with_layer(shape: Shape, mlp_bias: bool, output_without_bias: bool) -> Shape:
    """The block's parameters in the order in which transformers makes them."""
    hidden, width, dim = shape.hidden, shape.intermediate, shape.head_dim
    layer: list[tuple[str, int, int]] = []

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> None:
        layer.append((f"{name}.weight", inputs * outputs, 2))
        if bias:
            layer.append((f"{name}.bias", outputs, 1))

    linear("self_attn.q_proj", hidden, shape.num_heads * dim, shape.attention_bias)
    linear("self_attn.k_proj", hidden, shape.num_kv_heads * dim, shape.attention_bias)
    linear("self_attn.v_proj", hidden, shape.num_kv_heads * dim, shape.attention_bias)
    linear(
        "self_attn.o_proj", shape.num_heads * dim, hidden, shape.attention_bias and not output_without_bias
    )
    if shape.head_norms:
        layer += [("self_attn.q_norm.weight", dim, 1), ("self_attn.k_norm.weight", dim, 1)]
    if shape.num_experts:
        layer.append(("mlp.experts.gate_up_proj", shape.num_experts * 2 * width * hidden, 3))
        layer.append(("mlp.experts.down_proj", shape.num_experts * hidden * width, 3))
        layer.append(("mlp.gate.weight", shape.num_experts * hidden, 2))
    else:
        linear("mlp.gate_proj", hidden, width, mlp_bias)
        linear("mlp.up_proj", hidden, width, mlp_bias)
        linear("mlp.down_proj", width, hidden, mlp_bias)
    layer += [("input_layernorm.weight", hidden, 1), ("post_attention_layernorm.weight", hidden, 1)]
    return Shape(**{**shape.__dict__, "layer": tuple(layer)})
