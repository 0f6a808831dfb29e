"""The lean layer: a decoder block as two tiled halves around attention, with a backward of its own.

    tiles of [norm, q/k/v, rotary] -> exchange -> attention -> exchange -> tiles of [output projection, residual, norm,
    MLP or experts, residual]

Kept for backward, in host memory: the block's input, the attention output and its log-sum-exp. Attention then runs
forward once in a step (plain checkpointing runs it twice: at 1M tokens that is 4.5 units of work in place of 3.5), the MLP
twice, and beside q, k, v and what is kept no tensor of the whole local sequence exists.

Every number is computed by the model's own submodules. The first half is the attention module's own forward, stopped when
it hands q, k and v to the attention function; the second half is named by the model's family in `models/registry.py`,
whose `lean` entry vouches that a block is norm, attention, residual, norm, MLP, residual. Other models keep the generic
levers (`lean_obstacle` says why). Under ZeRO-3 the block is a leaf: gathered once for all tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from stack.config.schema import MemoryConfig
from stack.models.registry import LeanNames, family_of
from stack.ops.attention_kernel import AttentionKernel
from stack.ops.host_store import HostStore, Kept
from stack.ops.param_grads import ParamGrads
from stack.parallel.exchange import (
    HeadPlan,
    exchange,
    joined_heads,
    plan_heads,
    put_heads,
    row_slices,
    take_heads,
    whole_rows,
)
from stack.parallel.kernels import make_kernel
from stack.parallel.ulysses import AttentionSettings, QkvReady

QUERIES_A_CALL = 131_072
"""Queries over all heads of one attention call, unless the settings say heads: with 128 queries a block that is 1,024
blocks, some for each of the 132 processors of an H100, so that a longer call would be no faster."""


@dataclass
class Lean:
    """One block and its settings. tile: tokens; attention_heads: see `MemoryConfig.attention_heads`."""

    block: nn.Module
    names: LeanNames
    attention: nn.Module
    settings: AttentionSettings
    tile: int
    attention_heads: int
    store: HostStore


@dataclass
class Call:
    """The arguments of one forward that are the same for the whole block."""

    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor
    others: dict[str, Any]
    num_heads: int = 0
    """Query heads of the model, known once the first tile has run."""


@dataclass
class Rows:
    """Whole rows of this rank's heads, [rows, heads_local, seq, dim], and the way back.

    query, key and value are parts of `whole`. num_kv: of the model. tile: the slice's own q, k and v with their graph, where
    it is a single tile and gradients are recorded.
    """

    whole: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    plan: HeadPlan
    num_kv: int
    kernel: AttentionKernel
    tile: QkvReady | None


def install_lean(
    blocks: list[nn.Module],
    attentions: list[nn.Module],
    settings: AttentionSettings,
    family: str,
    memory: MemoryConfig,
    stage: int,
) -> None:
    """Change the forward of each block instance. The attention modules must hold `settings` already, with `lean` set."""
    names = family_of(family).lean
    assert names is not None, "ask lean_obstacle first"
    store = HostStore.of(memory)
    for block, attention in zip(blocks, attentions, strict=True):
        if stage == 3:
            set_z3_leaf_module(block, True)
        lean = Lean(block, names, attention, settings, memory.mlp_tile, memory.attention_heads, store)
        block.forward = _lean_forward(lean)


def lean_obstacle(blocks: list[nn.Module], family: str, config: Any) -> str | None:
    """Why this model cannot run as lean layers, or None."""
    names = family_of(family).lean
    if names is None:
        return f"no `lean` entry for {family!r} in stack/models/registry.py"
    if getattr(config, "attention_dropout", 0.0):
        return "the model has attention dropout"
    if len(set(blocks)) < len(blocks):
        return "a block is applied several times"
    return None


def _lean_forward(lean: Lean):
    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert not args, "decoder blocks get everything but the hidden state by name"
        cos, sin = kwargs.pop("position_embeddings")
        # Whatever is a tensor here belongs to the whole slice, not to a tile; positions are in cos and sin.
        others = {key: value for key, value in kwargs.items() if not torch.is_tensor(value)}
        call = Call(cos, sin, kwargs["cu_seq_lens_q"], others | {"attention_mask": None})
        if not torch.is_grad_enabled():
            return _forward(lean, call, hidden)[0]
        params = [param for param in lean.block.parameters() if param.requires_grad]
        return _LeanBlock.apply(hidden, lean, call, *params)

    return forward


class _LeanBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, lean: Lean, call: Call, *params: Tensor) -> Tensor:
        output, mixed, lse = _forward(lean, call, hidden)
        ctx.kept = lean.store.keep([hidden, mixed] if lse is None else [hidden, mixed, lse])
        ctx.lean, ctx.call, ctx.params = lean, call, params
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sums = ParamGrads(ctx.params)
        grad_hidden = _backward(ctx.lean, ctx.call, ctx.kept, grads[0], sums)
        return grad_hidden if ctx.needs_input_grad[0] else None, None, None, *sums.totals()


def _tiles(seq_local: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, seq_local)) for start in range(0, seq_local, tile)]


def _first_half(lean: Lean, call: Call, hidden: Tensor, part: slice) -> QkvReady:
    """Norm, projections and rotary of one tile; q [rows, heads, tile, dim], k and v with kv_heads.

    hidden: the tile itself, [rows, tile, hidden].
    """
    normed = getattr(lean.block, lean.names.input_norm)(hidden)
    positions = (call.cos[:, part], call.sin[:, part])
    try:
        lean.attention(
            hidden_states=normed, position_embeddings=positions, cu_seq_lens_q=call.cu_seqlens, **call.others
        )
    except QkvReady as ready:
        # Its traceback would keep the tile's tensors alive.
        return ready.with_traceback(None)
    raise AssertionError("the attention module did not call its attention function")


def _second_half(lean: Lean, hidden: Tensor, mixed: Tensor) -> Tensor:
    """Output projection to block output of one tile. hidden [rows, tile, hidden], mixed [rows, tile, heads * dim]."""
    hidden = hidden + getattr(lean.attention, lean.names.out_proj)(mixed)
    return hidden + getattr(lean.block, lean.names.mlp)(getattr(lean.block, lean.names.post_norm)(hidden))


def _heads_of_rows(lean: Lean, call: Call, hidden: Tensor) -> Rows:
    """q, k and v of all tiles, in one exchange; autograd sees neither the buffers nor the exchange."""
    settings, buffer, plan, ready = lean.settings, None, None, None
    parts = _tiles(hidden.shape[1], lean.tile)
    for part in parts:
        ready = _first_half(lean, call, hidden[:, part], part)
        rows, num_q, _, dim = ready.query.shape
        if buffer is None or plan is None:
            plan = plan_heads(num_q, ready.key.shape[1], settings.sp, settings.sp_rank)
            heads_local = plan.num_q_local + 2 * plan.num_kv_local
            buffer = ready.query.new_empty(settings.sp, rows, hidden.shape[1], heads_local, dim)
        put_heads(buffer, part, 0, ready.query.detach())
        put_heads(buffer, part, plan.num_q_local, ready.key.detach(), plan)
        put_heads(buffer, part, plan.num_q_local + plan.num_kv_local, ready.value.detach(), plan)
    assert buffer is not None and plan is not None and ready is not None
    whole = whole_rows(exchange(buffer, settings.sp_group))
    query, key, value = whole.split([plan.num_q_local, plan.num_kv_local, plan.num_kv_local], dim=1)
    call.num_heads = ready.query.shape[1]
    kernel = make_kernel(settings.backend, call.cu_seqlens, query, ready.how)
    tile = ready if len(parts) == 1 and torch.is_grad_enabled() else None
    return Rows(whole, query, key, value, plan, ready.key.shape[1], kernel, tile)


def _head_calls(at: Rows, size: int) -> list[tuple[slice, list[slice]]]:
    """(key/value heads, query heads of each attention call on them), with at most `size` query heads a call.

    One key/value head may take several calls; query heads of several share a call only where plain grouping holds.
    """
    (num_q, seq), num_kv = at.query.shape[1:3], at.key.shape[1]
    size = size or math.ceil(QUERIES_A_CALL / seq)
    group, owners = num_q // num_kv, at.plan.q_to_kv
    step = 1 if owners is not None else max(1, size // group)
    calls = []
    for first in range(0, num_kv, step):
        last = min(first + step, num_kv)
        heads = range(first * group, last * group)
        if owners is not None:
            # In order; a key/value head that is here only to even out the exchange has no queries.
            heads = [head for head, owner in enumerate(owners) if owner == first]
        parts = [heads[place : place + size] for place in range(0, len(heads), size)]
        if parts:
            calls.append((slice(first, last), [slice(part[0], part[-1] + 1) for part in parts]))
    return calls


def _forward(lean: Lean, call: Call, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(block output, attention output [rows, seq_local, heads * dim], log-sum-exp [rows, heads_local, seq])."""
    at = _heads_of_rows(lean, call, hidden)
    rows, num_q, seq, dim = at.query.shape
    out = at.query.new_empty(rows, seq, num_q, dim).transpose(1, 2)
    lse: Tensor | None = None
    for kv, parts in _head_calls(at, lean.attention_heads):
        for heads in parts:
            out[:, heads], found = at.kernel.forward(at.query[:, heads], at.key[:, kv], at.value[:, kv])
            if found is not None:
                lse = found.new_empty(rows, num_q, seq) if lse is None else lse
                lse[:, heads] = found
    del at
    mixed = joined_heads(exchange(row_slices(out, lean.settings.sp), lean.settings.sp_group))
    del out
    output = torch.empty_like(hidden)
    for part in _tiles(hidden.shape[1], lean.tile):
        output[:, part] = _second_half(lean, hidden[:, part], mixed[:, part])
    return output, mixed, lse


def _backward(lean: Lean, call: Call, kept: Kept, grad: Tensor, sums: ParamGrads) -> Tensor:
    """Gradient of the block's input, [rows, seq_local, hidden]; parameter gradients go to `sums`."""
    hidden, mixed, *rest = kept.take(fetch_next=False)
    sp, num_heads = lean.settings.sp, call.num_heads
    (rows, seq_local), num_q, dim = hidden.shape[:2], num_heads // sp, mixed.shape[-1] // num_heads
    parts = _tiles(seq_local, lean.tile)
    grad_hidden = torch.empty_like(hidden) if len(parts) > 1 else None
    # The attention output and its gradient go to the ranks of their heads together. The tiles read it from there, so that
    # it is held once: twice would be 1 GiB more while the MLP goes backward on 1M tokens of Qwen3-8B over 8 GPUs.
    pair = mixed.new_empty(sp, rows, seq_local, 2 * num_q, dim)
    put_heads(pair, slice(None), 0, mixed.view(rows, seq_local, num_heads, dim).transpose(1, 2))
    del mixed
    for part in parts:
        own = joined_heads(pair[:, :, part, :num_q])
        with torch.enable_grad():
            inputs = [hidden[:, part].detach().requires_grad_(), own.requires_grad_()]
            found = sums.backward([_second_half(lean, *inputs)], inputs, [grad[:, part]])
        if grad_hidden is None:
            grad_hidden = found[0]
        else:
            grad_hidden[:, part] = found[0]
        put_heads(pair, part, num_q, found[1].view(rows, -1, num_heads, dim).transpose(1, 2))
    assert grad_hidden is not None
    del own, inputs, found
    pair = whole_rows(exchange(pair, lean.settings.sp_group))
    # A single tile is run once for both its q, k, v and its backward; of several only one may be held at a time.
    with torch.set_grad_enabled(len(parts) == 1):
        whole_slice = hidden.detach().requires_grad_(len(parts) == 1)
        at = _heads_of_rows(lean, call, whole_slice)
    _attention_backward(lean, at, pair, rest[0] if rest else None)
    del pair
    # Not before: attention's backward is the peak of the step (at 1M tokens on 8 GPUs the next block's are 2 GiB).
    lean.store.fetch_next()
    grads = exchange(row_slices(at.whole, sp), lean.settings.sp_group)
    plan, num_kv, tile, both = at.plan, at.num_kv, at.tile, num_q + at.plan.num_kv_local
    del at
    for part in parts:
        tile_grads = [
            take_heads(grads, part, 0, num_q, num_heads),
            take_heads(grads, part, num_q, plan.num_kv_local, num_kv, plan),
            take_heads(grads, part, both, plan.num_kv_local, num_kv, plan),
        ]
        with torch.enable_grad():
            source = whole_slice if tile is not None else hidden[:, part].detach().requires_grad_()
            ready = tile or _first_half(lean, call, source, part)
            (found,) = sums.backward([ready.query, ready.key, ready.value], [source], tile_grads)
        grad_hidden[:, part] += found
    return grad_hidden


def _attention_backward(lean: Lean, at: Rows, pair: Tensor, lse: Tensor | None) -> None:
    """Write the gradients of q, k and v over q, k and v, each once it is not read any more.

    pair: attention output and its gradient, [rows, 2 * heads_local, seq, dim].
    """
    out, grad_out = pair.chunk(2, dim=1)
    calls = _head_calls(at, lean.attention_heads)
    for kv, parts in calls:
        key, value = at.key[:, kv], at.value[:, kv]
        sums: list[Tensor] = []
        for heads in parts:
            scores = None if lse is None else lse[:, heads]
            at.query[:, heads], *found = at.kernel.backward(
                grad_out[:, heads], at.query[:, heads], key, value, out[:, heads], scores
            )
            if sums:  # in fp32: in bf16 the sum would be rounded at every call
                found = [total.float().add_(one) for total, one in zip(sums, found, strict=True)]
            sums = found
            del found
        key.copy_(sums[0])
        value.copy_(sums[1])
    # Key/value heads sent here only to even out the exchange are in no call.
    for kv in set(range(at.key.shape[1])).difference(*(range(kv.start, kv.stop) for kv, _ in calls)):
        at.key[:, kv], at.value[:, kv] = 0, 0
