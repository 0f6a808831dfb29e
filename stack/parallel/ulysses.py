"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509) and packed documents, as one attention function.

A rank holds a slice of every row and all heads; for attention the ranks of a row exchange, so that each holds the whole
row and a slice of the heads. Queries, keys and values travel in one exchange, the result in a second. Positions never
travel: rotary embedding happens before, on the rank's own positions.

The function is registered with transformers under a name of our own, so other models in the process are untouched, and
reads its settings from the attention module it is called for. It needs `cu_seq_lens_q`, the document boundaries of the
whole rows, among the model's keyword arguments, and refuses to run without: silently attending across documents is the
fault this exists to prevent.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stack.dist.collectives import all_to_all
from stack.errors import ModelError
from stack.ops.attention import sdpa_documents
from stack.parallel.exchange import HeadPlan, plan_heads
from stack.parallel.flex import flex_documents

ATTENTION_NAME = "stack_ulysses"
SETTINGS = "stack_attention"
"""Attribute of an attention module instance that holds its AttentionSettings."""


@dataclass
class AttentionSettings:
    """What one model's attention needs to know. sp_group is None without sequence parallelism."""

    backend: str
    sp: int
    sp_rank: int
    sp_group: dist.ProcessGroup | None
    lean: bool = False
    """Stop the attention module's forward when q, k and v are there: `lean.py` does the rest."""


class QkvReady(Exception):
    """Carries a tile's q, k and v, and how they are to be attended, out of a model's own attention forward; no fault."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, how: How):
        super().__init__()
        self.query, self.key, self.value, self.how = query, key, value, how


@dataclass(frozen=True)
class How:
    """What a model asks of its attention. extras: softcap and sinks, which only flash kernels compute."""

    scale: float
    window: int | None
    dropout: float
    extras: dict[str, Any]


def install_attention(attentions: list[nn.Module], config: Any, settings: AttentionSettings) -> None:
    """Route the attention of one model through `ulysses_attention`. config: the model's own Hugging Face config."""
    AttentionInterface.register(ATTENTION_NAME, ulysses_attention)
    # No mask is ever built: documents are kept apart by their boundaries.
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
    if settings.backend not in ("sdpa", "flex_attention") and settings.backend not in ALL_ATTENTION_FUNCTIONS:
        from transformers.integrations.hub_kernels import load_and_register_attn_kernel

        load_and_register_attn_kernel(settings.backend)
    config._attn_implementation = ATTENTION_NAME
    for module in attentions:
        setattr(module, SETTINGS, settings)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    query [rows, heads, seq_local, head_dim], key and value [rows, kv_heads, seq_local, head_dim]. Returns
    [rows, seq_local, heads, head_dim].
    """
    settings: AttentionSettings = getattr(module, SETTINGS)
    _refuse_unknown(module, attention_mask, cu_seq_lens_q, kwargs | {"dropout": dropout}, settings.backend)
    assert cu_seq_lens_q is not None
    extras = {key: kwargs[key] for key in ("softcap", "s_aux") if kwargs.get(key) is not None}
    how = How(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, dropout, extras)
    if settings.lean:
        raise QkvReady(query, key, value, how)
    if settings.sp_group is not None:
        query, key, value = _to_heads(query, key, value, settings, settings.sp_group)
        if "s_aux" in extras:  # one sink a query head
            extras["s_aux"] = extras["s_aux"].chunk(settings.sp)[settings.sp_rank]
    out = attend(settings.backend, query, key, value, cu_seq_lens_q, how)
    if settings.sp_group is not None:
        out = _to_sequence(out, settings.sp, settings.sp_group)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(
    module: nn.Module,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    kwargs: dict[str, Any],
    backend: str,
) -> None:
    name = type(module).__name__
    if cu_seqlens is None:
        raise ModelError(
            f"{name} does not hand keyword arguments down to its attention, so documents cannot be kept apart"
        )
    if attention_mask is not None:
        raise ModelError(
            f"{name} builds an attention mask of its own, which sequence parallelism cannot honour"
        )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ModelError(f"{name} is not causal: only causal language models can be trained here")
    if backend == "flex_attention" and kwargs.get("dropout"):
        raise ModelError(
            "model.attention='flex_attention' has no attention dropout. Fix: set the model's to 0, or use sdpa"
        )
    changes = [key for key in ("softcap", "s_aux", "position_bias") if kwargs.get(key) is not None]
    if changes and backend in ("sdpa", "flex_attention"):
        raise ModelError(
            f"model.attention={backend!r} cannot compute {name}'s {', '.join(changes)}. Fix: a flash kernel"
        )


def _to_heads(
    query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, heads, seq_local, dim] of all heads -> [rows, heads_local, seq, dim], one exchange for all three."""
    sp, (rows, heads, seq_local, dim) = settings.sp, query.shape
    plan = plan_heads(heads, key.shape[1], sp, settings.sp_rank)
    key, value = _for_all_ranks(key, plan), _for_all_ranks(value, plan)
    per_rank = [
        query.view(rows, sp, plan.num_q_local, seq_local, dim),
        key.view(rows, sp, plan.num_kv_local, seq_local, dim),
        value.view(rows, sp, plan.num_kv_local, seq_local, dim),
    ]
    # [sp (receiver), rows, heads_local of q, k and v, seq_local, dim]
    parts = torch.cat(per_rank, dim=2).transpose(0, 1)
    parts = all_to_all(parts, group)  # [sp (sender), ...]: the sender's slice of the sequence
    whole = parts.permute(1, 2, 0, 3, 4).reshape(rows, -1, sp * seq_local, dim)
    sizes = [plan.num_q_local, plan.num_kv_local, plan.num_kv_local]
    query, key, value = whole.split(sizes, dim=1)
    if plan.q_to_kv is not None:
        spread = torch.tensor(plan.q_to_kv, device=key.device)
        key, value = key.index_select(1, spread), value.index_select(1, spread)
    return query, key, value


def _for_all_ranks(heads: Tensor, plan: HeadPlan) -> Tensor:
    """Key/value heads in the order in which the ranks get them. Backward sums what several ranks send back; an index would
    do so in bf16 and, on a GPU, in any order."""
    if plan.kv_copies:
        return heads if plan.kv_copies == 1 else heads.repeat_interleave(plan.kv_copies, dim=1)
    return heads.index_select(1, torch.tensor(plan.kv_index, device=heads.device))


def _to_sequence(out: Tensor, sp: int, group: dist.ProcessGroup) -> Tensor:
    """[rows, heads_local, seq, dim] -> [rows, heads, seq_local, dim]."""
    rows, heads_local, seq, dim = out.shape
    parts = out.view(rows, heads_local, sp, seq // sp, dim).permute(
        2, 0, 1, 3, 4
    )  # [sp (receiver), rows, ...]
    parts = all_to_all(parts, group)  # [sp (sender), ...]: the sender's heads
    return parts.transpose(0, 1).reshape(rows, sp * heads_local, seq // sp, dim)


def attend(backend: str, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, how: How) -> Tensor:
    """Attention over whole rows with the chosen kernel; [rows, heads, seq, dim] in and out."""
    if backend == "sdpa":
        return sdpa_documents(query, key, value, cu_seqlens, how.scale, how.window, how.dropout)
    if backend == "flex_attention":
        return flex_documents(query, key, value, cu_seqlens, how.scale, how.window)
    return _flash_documents(backend, query, key, value, cu_seqlens, how)


def _flash_documents(
    backend: str, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, how: How
) -> Tensor:
    """A flash kernel through transformers' own wrapper, in its variable-length form: all rows become one."""
    rows, _, seq, _ = query.shape
    query, key, value = (_one_row(part) for part in (query, key, value))
    bounds = cu_seqlens.to(query.device, non_blocking=True)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    # The wrapper reads the kernel's name from the module; the real module's config carries our name.
    caller = SimpleNamespace(config=SimpleNamespace(_attn_implementation=backend), is_causal=True)
    out, _ = ALL_ATTENTION_FUNCTIONS[backend](
        caller,
        query,
        key,
        value,
        None,
        dropout=how.dropout,
        scaling=how.scale,
        sliding_window=how.window,
        **how.extras,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
    )  # [1, rows * seq, heads, dim]
    return out.view(rows, seq, *out.shape[2:]).transpose(1, 2)


def _one_row(part: Tensor) -> Tensor:
    """[rows, heads, seq, dim] -> [1, heads, rows * seq, dim]; the wrapper moves heads behind the sequence itself."""
    rows, heads, seq, dim = part.shape
    return part.transpose(1, 2).reshape(1, rows * seq, heads, dim).transpose(1, 2)
