"""A layer and the loss in the forms of other systems; see systems.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stack.plan.blocks import Block, Work, entered_before, flash_scratch, mlp, project, run_in
from stack.plan.forecast import ATTENTION, GATHERED, HIDDEN, KEPT, LOSS, MLP
from stack.plan.operators import Capture
from stack.plan.tensors import INDEX, T, backward
from stack.plan.zero3 import Param
from tests.plan.jobs import GIB, Job, OthersOperators, Shards

_ATTENTION, _MLP, _HIDDEN, _KEPT, _LOSS, _GATHERED = (
    INDEX[one] for one in (ATTENTION, MLP, HIDDEN, KEPT, LOSS, GATHERED)
)


def run_layer(op: OthersOperators, job: Job, work: Work, block: Block, hidden: T) -> T:
    if not job.ckpt:
        return _block(op, job, work, block, _done(op, hidden))
    with op.no_grad():
        output = _block(op, job, work, block, hidden)

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        for module in () if job.reentrant else entered_before(block):
            op.zero.fetch(module)
        capture = Capture([])
        given = op.new(work.hidden, _KEPT) if job.offload_ckpt else saved[0]
        with op.capturing(capture):
            source = capture.input(given)
            del given
            again = _block(op, job, work, block, source, ends_early=not job.reentrant)
            del source
        grad = grads[0]
        assert grad is not None
        roots = [(again, grad)]
        if not job.reentrant:  # the reentrant kind holds its output and the incoming gradient to the end
            grads.clear()
            del grad, again
        backward(roots)
        if isinstance(op.zero, Shards) and job.backend == "fsdp2":
            op.zero.layer_done()
        return capture.close()

    return op.record("checkpoint", [hidden], output, [] if job.offload_ckpt else [hidden], back)


def _done(op: OthersOperators, hidden: T) -> T:
    """FSDP2's hook at the end of a layer's backward."""

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        if isinstance(op.zero, Shards) and op.zero.job.backend == "fsdp2":
            op.zero.layer_done()
        return [grads[0]]

    return op.record("done", [hidden], T(hidden.store, hidden.size), [], back)


def _block(op: OthersOperators, job: Job, work: Work, block: Block, hidden: T, ends_early: bool = False) -> T:
    normed = run_in(
        op, block, "input_layernorm", lambda x: op.norm(x, block["input_layernorm"], work.tokens), hidden
    )
    mixed = _attention(op, job, work, block, normed)
    del normed
    middle = op.add(hidden, mixed, _HIDDEN)
    del hidden, mixed
    normed = run_in(
        op, block, "post_attention_layernorm",
        lambda x: op.norm(x, block["post_attention_layernorm"], work.tokens), middle,
    )  # fmt: skip
    if job.tiled_mlp:
        out = _tiled_mlp(op, job, work, block, normed, empty=ends_early)
    elif job.fused_swiglu:
        out = _liger_mlp(op, work, block, normed)
    else:
        out = mlp(op, work, block, normed, stops=ends_early)
    del normed
    return op.add(middle, out, _HIDDEN, empty=ends_early)


def _attention(op: OthersOperators, job: Job, work: Work, block: Block, normed: T) -> T:
    query, key, value = project(op, work, block, normed)
    if work.sp > 1:
        there = [_exchange(op, part, size) for part, size in _sizes(work, query, key, value)]
        out = _kernel(op, job, work, *there)
        del there
        out = _back(op, out)
    else:
        out = _kernel(op, job, work, query, key, value)
        if job.attn in ("cudnn", "sdpa-flash"):
            out = op.copy(out, _ATTENTION)
    return run_in(op, block, "o_proj", lambda x: op.linear(x, block["o_proj"], work.hidden, _HIDDEN), out)


def _sizes(work: Work, query: T, key: T, value: T) -> list[tuple[T, int]]:
    return [(query, query.size), (key, work.key_spread), (value, work.key_spread)]


def _exchange(op: OthersOperators, part: T, size: int) -> T:
    """`_combine_local_sequences`: a contiguous copy by rank, the exchange, a copy with heads first."""
    given = part.size
    sent = op.record("copy", [part], op.new(size, _ATTENTION), [], lambda s, g: [op.new(given, _ATTENTION)])
    received = op.record(
        "all-to-all", [sent], op.new(size, _ATTENTION), [], lambda s, g: [op.new(size, _ATTENTION)]
    )
    del sent
    return op.record(
        "copy", [received], op.new(size, _ATTENTION), [], lambda s, g: [op.new(size, _ATTENTION)]
    )


def _back(op: OthersOperators, out: T) -> T:
    """`_partition_global_sequence`: the exchange, and a copy with the ranks' heads side by side."""
    size = out.size
    received = op.record(
        "all-to-all", [out], op.new(size, _ATTENTION), [], lambda s, g: [op.new(size, _ATTENTION)]
    )
    return op.record(
        "copy", [received], op.new(size, _ATTENTION), [], lambda s, g: [op.new(size, _ATTENTION)]
    )


def _kernel(op: OthersOperators, job: Job, work: Work, query: T, key: T, value: T) -> T:
    size, kv = query.size, key.size
    out, scores = op.new(size, _ATTENTION), op.new(work.scores, _ATTENTION)
    if job.attn in ("fa2", "sdpa-flash"):
        scratch = flash_scratch(work, size)
    else:  # FlashAttention 3, cuDNN: dq, and with grouped heads dk and dv, in fp32
        scratch = 2 * size + work.scores + (4 * kv if work.grouped else 0)
    whole = kv * job.sp
    if job.ring:
        # Keys and values of all ranks, gathered; their gradients likewise, in fp32 while they are summed.
        op.new(2 * whole + 2 * size, _ATTENTION)
        scratch += 2 * whole + 4 * whole

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.operation = "backward of attention"
        found = [op.new(size, _ATTENTION), op.new(kv, _ATTENTION), op.new(kv, _ATTENTION)]
        op.new(scratch, _ATTENTION)
        return found

    return op.record(
        "attention", [query, key, value], T(out.store, size), [query, key, value, out, scores], back
    )


def _liger_mlp(op: OthersOperators, work: Work, block: Block, hidden: T) -> T:
    """Liger keeps gate and up, and writes their gradients over them."""
    width = work.tokens * work.shape.intermediate * 2
    gate = run_in(op, block, "gate_proj", lambda x: op.linear(x, block["gate_proj"], width, _MLP), hidden)
    up = run_in(op, block, "up_proj", lambda x: op.linear(x, block["up_proj"], width, _MLP), hidden)

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        return [T(one.store, one.size) for one in saved]

    product = op.record("swiglu", [gate, up], op.new(width, _MLP), [gate, up], back)
    del gate, up
    return run_in(
        op, block, "down_proj", lambda x: op.linear(x, block["down_proj"], hidden.size, _MLP), product
    )


def _tiled_mlp(op: OthersOperators, job: Job, work: Work, block: Block, hidden: T, empty: bool = False) -> T:
    """DeepSpeed's TiledMLP: parts joined by a copy; in backward the gradients of the weights add up in place."""
    size = hidden.size
    parts = job.mlp_shards or math.ceil(work.tokens / work.shape.hidden)
    part = -(-size // parts)
    plain = Block(block.params, {})
    names = ("gate_proj", "up_proj", "down_proj")

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.operation = "backward of a tile of the MLP"
        for name in names:
            op.zero.fetch(block.modules[name])
        found = op.new(size, _MLP)
        totals: dict[Param, T] = {}
        for _ in range(2):
            capture = Capture([block[name] for name in names])
            with op.capturing(capture):
                output = mlp(op, work, plain, capture.input(T(saved[0].store, part)))
            grad = grads[0]
            assert grad is not None
            backward([(output, T(grad.store, part))])
            totals = totals or dict(capture.found)
            capture.close()
            del output
        for name in names:
            op.zero.release(block.modules[name])
        return [found, *(totals.pop(block[name]) for name in names)]

    output = op.new(0 if empty else size, _MLP)
    for name in names:
        op.zero.fetch(block.modules[name])
    if not empty:
        with op.no_grad():
            pieces = op.new(size, _MLP)
            mlp(op, work, plain, T(hidden.store, part))
            del pieces
    for name in names:
        op.zero.release(block.modules[name])
    return op.record("tiled", [hidden, *(block[name] for name in names)], output, [hidden], back)


def run_loss(op: OthersOperators, job: Job, work: Work, param: Param, hidden: T) -> T:
    vocab, size = work.shape.vocab, hidden.size
    fp32_head = 2 if job.head_fp32 else 1
    op.ledger.operation = "loss"
    if job.fused_ce or job.tiled_loss:
        rows = min(work.tokens, job.loss_rows or max(1, GIB // (4 * vocab)))
        if job.fused_ce:  # Liger: as many rows as make the logits as large as the hidden states
            rows = min(work.tokens, 1 << (-(-work.tokens * work.shape.hidden // vocab) - 1).bit_length())
        kept = [op.new(size, _LOSS), op.new(2 * fp32_head * param.numel, _LOSS)]
        op.new(rows * vocab * (6 if job.fused_ce else 16), _LOSS)
        if job.head_fp32:
            op.new(4 * param.numel, _LOSS)

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            return [op.new(size, _LOSS), op.new(2 * param.numel, _GATHERED)]

        return op.record("loss", [hidden, param], op.new(4, _LOSS), kept, back)
    logits = op.new(int(work.tokens * vocab * job.logit_bytes), _LOSS)
    narrow = op.new(0, _LOSS)

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.operation = "backward of the loss"
        return [op.new(size, _LOSS), op.new(2 * param.numel, _GATHERED)]

    return op.record("loss", [hidden, param], op.new(4, _LOSS), [hidden, logits, narrow], back)
