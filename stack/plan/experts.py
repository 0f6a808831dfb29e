"""A mixture of experts as transformers 5.24 runs it (integrations/moe.py, grouped_mm): tokens sorted by expert, two grouped
products. Each token is counted with `experts_per_token` experts, whichever they are."""

from __future__ import annotations

from collections.abc import Sequence

from stack.plan.blocks import Block, Work, run_in
from stack.plan.forecast import GATHERED, MLP
from stack.plan.operators import Operators
from stack.plan.tensors import INDEX, T
from stack.plan.zero3 import Param

_MLP, _GATHERED = INDEX[MLP], INDEX[GATHERED]
INT64 = 8


def experts(op: Operators, work: Work, block: Block, hidden: T) -> T:
    """Router and experts; hidden of any number of tokens in, the same size out."""
    shape = work.shape
    op.ledger.operation = "experts"
    tokens = hidden.size // (shape.hidden * work.width)
    pairs = tokens * shape.experts_per_token
    weights, places = run_in(op, block, "gate", lambda x: x, hidden), None
    del weights
    scores, places = _route(op, work, block, hidden, tokens, pairs)
    return run_in(
        op, block, "experts", lambda x: _chosen(op, work, block, x, scores, places, tokens, pairs), hidden
    )


def _route(op: Operators, work: Work, block: Block, hidden: T, tokens: int, pairs: int) -> tuple[T, T]:
    """(weights of the chosen experts, their numbers)."""
    every = tokens * work.shape.num_experts * work.width
    logits = op.linear(hidden, block["gate"], every, _MLP)
    probable = op.record(
        "softmax",
        [logits],
        op.new(op.wide(every), _MLP),
        [],
        lambda saved, grads: [op.new(every, _MLP)],
    )
    full, kept = op.wide(every), T(probable.store, probable.size)
    best = op.record(
        "topk", [probable], op.new(4 * pairs, _MLP), [kept], lambda saved, grads: [op.new(full, _MLP)]
    )
    places = op.new(INT64 * pairs, _MLP)
    scores = op.record(
        "to",
        [best],
        op.new(pairs * work.width, _MLP),
        [places],
        lambda saved, grads: [op.new(4 * pairs, _MLP)],
    )
    return scores, places


def _chosen(
    op: Operators, work: Work, block: Block, hidden: T, scores: T, places: T, tokens: int, pairs: int
) -> T:
    wide, narrow = pairs * work.shape.hidden * work.width, pairs * work.shape.intermediate * work.width
    order, sorted_places = op.new(INT64 * pairs, _MLP), op.new(INT64 * pairs, _MLP)
    rows = op.new(INT64 * pairs, _MLP)
    size = hidden.size

    def scatter(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.operation = "backward of the experts"
        return [op.new(size, _MLP)]

    selected = op.record("select", [hidden], op.new(wide, _MLP), [rows], scatter)
    del rows
    both = _grouped(op, selected, block["gate_up_proj"], 2 * narrow)
    del_selected = selected
    gate, up = _halves(op, both, narrow)
    del both
    active = op.silu(gate, _MLP)
    product = op.multiply(active, up, _MLP)
    del gate, up, active
    out = _grouped(op, product, block["down_proj"], wide)
    del product

    def weigh(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        to_out = op.new(wide, _MLP)
        op.new(wide, _MLP)  # the weights' gradient before it is summed
        return [to_out, op.new(pairs * work.width, _MLP)]

    weighted = op.record("weigh", [out, scores], op.new(wide, _MLP), [out], weigh)
    del out
    back_order = op.new(INT64 * pairs, _MLP)
    sorted_back = op.record(
        "select", [weighted], op.new(wide, _MLP), [back_order], lambda saved, grads: [op.new(wide, _MLP)]
    )
    del weighted
    # Its gradient is one row for all experts of a token, which the view before the sum copies.
    total = op.record("sum", [sorted_back], op.new(size, _MLP), [], lambda saved, grads: [op.new(wide, _MLP)])
    del sorted_back, del_selected, order, sorted_places
    return total


def _grouped(op: Operators, hidden: T, param: Param, size: int) -> T:
    given = hidden.size

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        to_input = op.new(given, _MLP)
        return [to_input, op.new(param.numel * op.width, _GATHERED)]

    return op.record("grouped", [hidden, param], op.new(size, _MLP), [hidden], back)


def _halves(op: Operators, both: T, size: int) -> tuple[T, T]:
    gate = op.record("chunk", [both], T(both.store, size), [], lambda saved, grads: [op.new(2 * size, _MLP)])
    up = T(both.store, size, gate.node, 1)
    if gate.node is not None:
        gate.node.outputs = 2
    return gate, up
