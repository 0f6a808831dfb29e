"""What a model is, in numbers, and where its parts are.

`describe` reads the numbers from the built model itself, not from the names of config fields, which differ between
families: heads and windows from the calls that its attention makes, weights from its parameters. The accessors are the
only way in which the rest of the stack reaches into a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from stack.errors import ModelError
from stack.models.probe import probe_attention, probe_logits
from stack.models.registry import family_of


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Numbers of one model. Weights are counted in elements, not bytes."""

    family: str
    """`model_type` of the Hugging Face config."""
    num_layers: int
    hidden: int
    intermediate: int
    """Width of one MLP, or of one expert in a mixture of experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the output head, with padding rows that no token uses."""
    tied: bool
    """The head's weight is the embedding's."""
    num_experts: int = 0
    """Experts of one layer that a router chooses from; 0 for a dense model."""
    experts_per_token: int = 0
    softcap: float | None = None
    """Logits go through softcap x tanh(logits / softcap) before the loss."""
    logit_scale: float = 1.0
    """The head's output is multiplied by this before the loss."""
    windows: tuple[int | None, ...] = ()
    """For each layer the sliding window (a token sees itself and window - 1 tokens before it); None: all before it."""
    attention_extras: tuple[str, ...] = ()
    """What the model asks of its attention beyond the plain kind: `softcap`, `s_aux` (sinks)."""
    num_parameters: int = 0
    """All parameters, tied ones once."""
    attention_weights: int = 0
    """Elements of the projection matrices of all attention layers."""
    mlp_weights: int = 0
    """Elements of the MLP matrices that one token meets, over all layers: chosen experts and router, not all experts."""
    num_active_parameters: int = 0
    """Parameters that one token meets: all but the experts not chosen."""

    @property
    def head_weights(self) -> int:
        """Elements of the output head."""
        return self.vocab * self.hidden


def body(model: nn.Module) -> nn.Module:
    """The decoder without its head; its output's `last_hidden_state` is what the head reads."""
    return cast(Any, model).get_decoder()


def head(model: nn.Module) -> nn.Module:
    """The linear layer from hidden states to logits."""
    found = cast(Any, model).get_output_embeddings()
    if found is None:
        raise ModelError(f"{type(model).__name__} has no output head: it is not a causal language model")
    return found


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, in order."""
    name = family_of(_model_type(model)).blocks
    found = getattr(body(model), name, None)
    if not isinstance(found, nn.ModuleList):
        raise ModelError(_layout_message(model, body(model), name))
    return list(found)


def final_norm(model: nn.Module) -> nn.Module | None:
    """The norm between the last layer and the head, or None where the family's name for it does not fit."""
    return getattr(body(model), family_of(_model_type(model)).final_norm, None)


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attention module of each layer."""
    return _halves(model, family_of(_model_type(model)).attention)


def mlps(model: nn.Module) -> list[nn.Module]:
    """The token-wise half of each layer: an MLP or a mixture of experts."""
    return _halves(model, family_of(_model_type(model)).mlp)


def _halves(model: nn.Module, name: str) -> list[nn.Module]:
    found = []
    for block in blocks(model):
        half = getattr(block, name, None)
        if half is None:
            raise ModelError(_layout_message(model, block, name))
        found.append(half)
    return found


def _layout_message(model: nn.Module, parent: nn.Module, name: str) -> str:
    children = ", ".join(child for child, _ in parent.named_children())
    return (
        f"{type(model).__name__}: {type(parent).__name__} has no `{name}` (it has {children}). "
        f"Fix: name its parts in FAMILIES of stack/models/registry.py, under {_model_type(model)!r}"
    )


def _model_type(model: nn.Module) -> str:
    return cast(Any, model).config.model_type


def describe(model: PreTrainedModel) -> ModelSpec:
    """Numbers of `model`, whose parameters may be on the meta device.

    Raises ModelError for a model that this stack would train wrongly: see `probe_attention` and `probe_logits`.
    """
    config: Any = model.config
    logits = probe_logits(model, body(model), head(model))
    calls = probe_attention(model, body(model), attentions(model), mlps(model))
    num_experts, experts_per_token = _experts(config)
    share = experts_per_token / num_experts if num_experts else 1.0
    mlp_parts = [_weights(mlp, num_experts) for mlp in mlps(model)]
    routed = sum(part[1] for part in mlp_parts)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    head_weight = cast(nn.Linear, head(model)).weight
    return ModelSpec(
        family=config.model_type,
        num_layers=len(calls),
        hidden=head_weight.shape[1],
        intermediate=(getattr(config, "moe_intermediate_size", None) if num_experts else None)
        or config.intermediate_size,
        num_heads=calls[0].num_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        vocab=head_weight.shape[0],
        tied=head_weight is cast(Any, model).get_input_embeddings().weight,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        softcap=logits.softcap,
        logit_scale=logits.scale,
        windows=tuple(call.window for call in calls),
        attention_extras=calls[0].extras,
        num_parameters=num_parameters,
        attention_weights=sum(sum(_weights(module, 0)) for module in attentions(model)),
        mlp_weights=round(sum(part[0] for part in mlp_parts) + routed * share),
        num_active_parameters=round(num_parameters - routed * (1.0 - share)),
    )


def _experts(config: Any) -> tuple[int, int]:
    """(experts a layer, experts a token), (0, 0) for a dense model."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if number := getattr(config, name, None):
            return number, config.num_experts_per_tok
    return 0, 0


def _weights(module: nn.Module, num_experts: int) -> tuple[int, int]:
    """Elements of the matrices in `module`: (met by every token, in routed experts).

    Experts are either stacked in one tensor whose first dimension counts them, or numbered children of `experts`.
    """
    always = routed = 0
    for name, parameter in module.named_parameters():
        stacked = parameter.ndim == 3 and parameter.shape[0] == num_experts
        numbered = any(
            part == "experts" and following.isdigit()
            for part, following in zip(name.split("."), name.split(".")[1:], strict=False)
        )
        if num_experts and (stacked or numbered):
            routed += parameter.numel() if parameter.ndim >= 2 else 0
        elif parameter.ndim >= 2:
            always += parameter.numel()
    return always, routed
