"""A mixture of experts as transformers 5.24 runs it (integrations/moe.py, grouped_mm): tokens sorted by expert, two grouped
products. Each token is counted with `experts_per_token` experts, whichever they are."""

from __future__ import annotations

from collections.abc import Sequence

from stack.plan.blocks import Block, Work
from stack.plan.forecast import GATHERED, MLP
from stack.plan.operators import Operators
from stack.plan.tensors import INDEX, T
from stack.plan.zero3 import Param

_MLP, _GATHERED = INDEX[MLP], INDEX[GATHERED]
INT64 = 8


def experts(op: Operators, work: Work, block: Block, hidden: T, stops: bool = False) -> T:
    """Router and experts; hidden of any number of tokens in, the same size out. stops: see `_chosen`."""
    shape = work.shape
    op.ledger.operation = "experts"
    tokens = hidden.size // (shape.hidden * work.width)
    pairs = tokens * shape.experts_per_token
    logits, scores, places = _route(op, work, block, hidden, tokens, pairs)
    out = _chosen(op, work, block, hidden, scores, places, pairs, stops)
    del logits  # nobody reads them, but the router's results have names to the end
    return out


def _route(op: Operators, work: Work, block: Block, hidden: T, tokens: int, pairs: int) -> tuple[T, T, T]:
    """(logits, weights of the chosen experts, their numbers)."""
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
    return logits, scores, places


def _chosen(
    op: Operators,
    work: Work,
    block: Block,
    hidden: T,
    scores: T,
    places: T,
    pairs: int,
    stops: bool,
) -> T:
    """stops: a recomputation ends at the last tensor that is kept, the order back, so what follows is never made.

    What the function there holds by name, the rows by expert and what the experts made of them, is alive to its end.
    """
    wide, narrow = pairs * work.shape.hidden * work.width, pairs * work.shape.intermediate * work.width
    order, sorted_places = op.new(INT64 * pairs, _MLP), op.new(INT64 * pairs, _MLP)
    rows = op.new(INT64 * pairs, _MLP)
    size, few = hidden.size, pairs * work.width

    def scatter(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.operation = "backward of the experts"
        return [op.new(size, _MLP)]

    selected = op.record("select", [hidden], op.new(wide, _MLP), [rows], scatter)
    del rows
    scores = op.record(
        "select", [scores], op.new(few, _MLP), [order], lambda saved, grads: [op.new(few, _MLP)]
    )
    counted = op.new(4 * pairs, _MLP)  # the experts' numbers once more, as the histogram takes them
    both = _grouped(op, selected, block["gate_up_proj"], 2 * narrow)
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
        return [to_out, op.new(few, _MLP)]

    behind = [op.record("weigh", [out, scores], op.new(wide, _MLP), [out], weigh)]
    total = _summed(op, behind, INT64 * pairs, 0 if stops else size, wide)
    del selected, out, order, sorted_places, counted
    return total


def _summed(op: Operators, given: list[T], order: int, size: int, wide: int) -> T:
    """What the experts made, `given`, back in the tokens' order and summed. size: of the sum, 0 where a recomputation ends
    before it; order: of the order back; wide: of `given`."""
    back_order = op.new(order, _MLP)
    sorted_back = op.record(
        "select",
        [given.pop()],
        op.new(wide if size else 0, _MLP),
        [back_order],
        lambda saved, grads: [op.new(wide, _MLP)],
    )
    # Its gradient is one row for all experts of a token, which the view before the sum copies.
    return op.record("sum", [sorted_back], op.new(size, _MLP), [], lambda saved, grads: [op.new(wide, _MLP)])


def _grouped(op: Operators, hidden: T, param: Param, size: int) -> T:
    given = hidden.size
    # A view of the gathered weights is kept, which outlives their release where nothing runs again.
    weight = [] if param.data is None else [T(param.data, param.numel * op.width)]

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        to_input = op.new(given, _MLP)
        return [to_input, op.new(param.numel * op.width, _GATHERED)]

    return op.record("grouped", [hidden, param], op.new(size, _MLP), [hidden, *weight], back)


def _halves(op: Operators, both: T, size: int) -> tuple[T, T]:
    gate = op.record("chunk", [both], T(both.store, size), [], lambda saved, grads: [op.new(2 * size, _MLP)])
    up = T(both.store, size, gate.node, 1)
    if gate.node is not None:
        gate.node.outputs = 2
    return gate, up
