"""Two questions put to a freshly built model, so that one this stack cannot train exactly is refused before it starts.

The stack takes hidden states from the body, computes head and loss itself, and replaces attention. That is right only if
the model does nothing else between hidden states and logits, and if all mixing between tokens goes through transformers'
attention interface, with the document boundaries handed down. Names of classes and config fields do not tell; running
the model does. Parameters may be on the meta device: no arithmetic of the model itself is needed. Instances are changed
for the duration of a call and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from stack.errors import ModelError

PROBE_NAME = "stack_probe"
"""Private name in transformers' table of attention functions."""

_PLAIN = {
    "dropout",
    "scaling",
    "sliding_window",
    "is_causal",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
}
"""Arguments of an attention call that every backend of this stack honours or rightly ignores."""

_EXTRAS = {"softcap", "s_aux"}
"""Arguments that the flash kernels honour and sdpa does not."""


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks of the attention function."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    extras: tuple[str, ...]


@dataclass(frozen=True)
class LogitRule:
    """logits = cap(scale x head(hidden)); softcap None: no cap."""

    scale: float
    softcap: float | None


def probe_attention(
    model: PreTrainedModel, body: nn.Module, attentions: list[nn.Module], mlps: list[nn.Module]
) -> list[AttentionCall]:
    """Run `body` on 4 tokens with a recording attention function: one call for each layer, or ModelError."""
    calls: list[AttentionCall] = []
    cu_seqlens = torch.tensor([0, 2, 4], dtype=torch.int32)

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        calls.append(_checked_call(module, query, key, value, kwargs, cu_seqlens))
        rows, heads, seq, _ = query.shape
        return query.new_empty(rows, seq, heads, value.shape[-1]), None

    AttentionInterface.register(PROBE_NAME, record)
    name = type(model).__name__
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in body.modules()):
        raise ModelError(f"{name} mixes tokens by convolution, which cannot be split over the sequence")
    config: Any = model.config
    before = config._attn_implementation
    device = next(body.parameters()).device
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)
    try:
        config._attn_implementation = PROBE_NAME
        # MLPs are token-wise; experts choose rows by data, which tensors without data cannot do. Neither can rotary
        # modules that look up the longest position of a batch.
        instead: list[tuple[nn.Module, Callable[..., Any]]] = [(mlp, _first_argument) for mlp in mlps]
        for module in body.modules():
            if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
                instead.append((module, _angles(module)))
        with _instead(instead), torch.no_grad():
            body(
                input_ids=tokens,
                position_ids=torch.arange(4, device=device)[None],
                attention_mask=None,
                use_cache=False,
                cu_seq_lens_q=cu_seqlens,
                cu_seq_lens_k=cu_seqlens,
            )
    except ModelError:
        raise
    except Exception as error:  # whatever a foreign forward stumbles over: not supported
        raise ModelError(
            f"{name} cannot be run with packed documents: {type(error).__name__}: {error}"
        ) from error
    finally:
        config._attn_implementation = before
    if len(calls) != len(attentions):
        raise ModelError(
            f"{name} has {len(attentions)} layers, but {len(calls)} of them use transformers' attention interface. The "
            "others mix tokens in another way (a recurrence or convolution), which cannot be split over the sequence"
        )
    if len({(call.num_heads, call.num_kv_heads, call.head_dim, call.extras) for call in calls}) != 1:
        raise ModelError(f"{name}: its layers differ in attention heads, which is not supported")
    return calls


def _checked_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], cu_seqlens: Tensor
) -> AttentionCall:
    name = type(module).__name__
    if kwargs.get("cu_seq_lens_q") is not cu_seqlens:
        raise ModelError(
            f"{name} does not hand document boundaries down to its attention: packed text would mix"
        )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ModelError(f"{name} is not causal: only causal language models can be trained")
    if value.shape[-1] != query.shape[-1]:
        raise ModelError(
            f"{name} has keys of {query.shape[-1]} and values of {value.shape[-1]}: not supported"
        )
    if query.shape[1] % key.shape[1]:
        raise ModelError(
            f"{name}: {query.shape[1]} query heads cannot share {key.shape[1]} key/value heads evenly"
        )
    extras = {key for key, value in kwargs.items() if value is not None and key not in _PLAIN}
    if unknown := extras - _EXTRAS:
        raise ModelError(
            f"{name} asks its attention for {', '.join(sorted(unknown))}, which no backend here computes"
        )
    window = kwargs.get("sliding_window")
    return AttentionCall(query.shape[1], key.shape[1], query.shape[3], window, tuple(sorted(extras)))


def probe_logits(model: PreTrainedModel, body: nn.Module, head: nn.Module) -> LogitRule:
    """What `model.forward` does between the body's hidden states and its logits, with known tensors in both places."""
    name = type(model).__name__
    hidden = torch.linspace(-1.0, 1.0, 3 * 8).view(1, 3, 8)
    raw = torch.linspace(-59.0, 61.0, 3 * 7).view(1, 3, 7)
    seen: list[Tensor] = []

    def fake_head(given: Tensor) -> Tensor:
        seen.append(given)
        return raw.clone()

    def fake_body(*args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=cast(Any, hidden))

    try:
        with _instead([(body, fake_body), (head, fake_head)]), torch.no_grad():
            logits = model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False).logits
    except Exception as error:  # as in probe_attention
        raise ModelError(
            f"{name}: its forward cannot be followed: {type(error).__name__}: {error}"
        ) from error
    if len(seen) != 1 or seen[0].shape != hidden.shape or not torch.equal(seen[0], hidden):
        raise ModelError(
            f"{name} changes the hidden states between body and head, so its loss cannot be tiled exactly"
        )
    ratio = (logits / raw).flatten()
    if torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-6, atol=0):
        return LogitRule(scale=ratio[0].item(), softcap=None)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap and torch.allclose(logits, cap * torch.tanh(raw / cap), rtol=1e-5, atol=1e-5):
        return LogitRule(scale=1.0, softcap=float(cap))
    raise ModelError(
        f"{name} changes its logits in a way that is neither a factor nor a soft cap: not supported"
    )


def _first_argument(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


def _angles(rotary: nn.Module) -> Callable[..., Any]:
    """A rotary module's forward, as far as shapes go."""

    def forward(hidden: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        angles = hidden.new_empty(*position_ids.shape, 2 * cast(Tensor, rotary.inv_freq).shape[-1])
        return angles, angles

    return forward


@contextmanager
def _instead(replacements: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Give these instances another forward for the duration of the block."""
    try:
        for module, forward in replacements:
            module.forward = forward
        yield
    finally:
        for module, _ in replacements:
            module.__dict__.pop("forward", None)
