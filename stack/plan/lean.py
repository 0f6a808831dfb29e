"""The lean layer of stack/parallel/lean.py by the sizes of its tensors: two tiled halves around attention, with a backward of
its own. Names follow that file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stack.config.model_checks import KEEPS_SCORES
from stack.plan.blocks import Block, Work, flash_scratch, mlp, project
from stack.plan.forecast import ATTENTION, GATHERED, HIDDEN, KEPT, MLP
from stack.plan.operators import Capture, Operators
from stack.plan.tensors import INDEX, T, backward
from stack.plan.zero3 import Param

_ATTENTION, _KEPT, _HIDDEN, _MLP = INDEX[ATTENTION], INDEX[KEPT], INDEX[HIDDEN], INDEX[MLP]
_GATHERED = INDEX[GATHERED]


class Sums:
    """`ops/param_grads.py`: gradients of one block's parameters over its tiles, in fp32 from the second on."""

    def __init__(self, op: Operators, params: Sequence[Param]):
        self.op, self.params = op, [param for param in params if param.trained]
        self.sums: dict[Param, T] = {}
        self.wide: set[Param] = set()

    def add(self, capture: Capture) -> list[T | None]:
        """Gradients of the inputs; those of the parameters are added up."""
        op, found = self.op, capture.found
        for param in list(found):
            if param not in self.sums:
                self.sums[param] = found[param]
            elif param not in self.wide and op.width != 4:
                self.wide.add(param)
                self.sums[param] = op.new(4 * param.numel, _GATHERED)
        del found
        return capture.close()

    def totals(self) -> list[T | None]:
        """In the parameters' own type. All are made before any sum goes."""
        op, made = self.op, []
        for param in self.params:
            total = self.sums.get(param)
            made.append(op.new(param.numel * op.width, _GATHERED) if param in self.wide else total)
        return made


@dataclass
class Layer:
    """Settings of lean blocks. tile: tokens. heads: query heads of one attention call."""

    op: Operators
    work: Work
    tile: int
    heads: int
    offload: bool

    @property
    def recomputes(self) -> bool:
        """Only torch's own operators hand out what backward needs; of others forward runs again (parallel/kernels.py)."""
        return self.work.attention not in KEEPS_SCORES


@dataclass(eq=False)
class Kept:
    """What a block keeps. `here` is empty while the host has it."""

    sizes: list[int]
    here: list[T]


def tiles(tokens: int, tile: int) -> list[int]:
    """Tokens of each tile that has to be counted: those between the second and the last are like the second."""
    whole, rest = divmod(tokens, tile)
    return [tile] * min(whole, 3 if not rest else 2) + [rest] * bool(rest)


def head_calls(work: Work, heads: int) -> list[tuple[int, list[int]]]:
    """(key/value heads, query heads of each attention call on them), as `_head_calls` there has them."""
    num_q = work.shape.num_heads // work.sp
    seq = work.tokens // work.rows * work.sp
    size = heads or -(-131_072 // seq)
    group = max(1, num_q // work.kv_local)
    step = max(1, size // group) if num_q % work.kv_local == 0 else 1
    calls = []
    for first in range(0, work.kv_local, step):
        kv = min(step, work.kv_local - first)
        queries = kv * group
        calls.append((kv, [min(size, queries - start) for start in range(0, queries, size)]))
    return calls


def first_half(layer: Layer, block: Block, hidden: T) -> tuple[T, T, T]:
    op, work = layer.op, layer.work
    op.ledger.operation = "tile of norm, q, k and v"
    normed = op.norm(hidden, block["input_layernorm"], hidden.size // (work.shape.hidden * work.width))
    return project(op, work, block, normed)


def second_half(layer: Layer, block: Block, hidden: T, mixed: T) -> T:
    op, work = layer.op, layer.work
    op.ledger.operation = "tile of output projection and MLP"
    projected = op.linear(mixed, block["o_proj"], hidden.size, _MLP)
    middle = op.add(hidden, projected, _MLP)
    del projected
    rows = hidden.size // (work.shape.hidden * work.width)
    out = mlp(op, work, block, op.norm(middle, block["post_attention_layernorm"], rows))
    return op.add(middle, out, _MLP)


def heads_of_rows(layer: Layer, block: Block, hidden: T) -> tuple[T, tuple[T, T, T] | None]:
    """(q, k and v of this rank's heads on the whole row, the single tile's own with its graph)."""
    op, work = layer.op, layer.work
    parts = tiles(work.tokens, layer.tile)
    size = work.query + 2 * work.key_spread
    buffer = ready = None
    for part in parts:
        view = op.view(hidden, part * hidden.size // work.tokens)
        made = first_half(layer, block, view)
        ready = made
        del made, view
        if buffer is None:
            buffer = op.new(size, _ATTENTION)
        if work.key_spread != work.key:
            for _ in range(2):
                op.new(part * work.key_spread // work.tokens, _ATTENTION)  # repeated heads, on their way
    op.ledger.operation = "q, k and v exchanged"
    whole = op.new(size, _ATTENTION) if work.sp > 1 else buffer
    assert whole is not None
    if work.rows > 1 and work.sp > 1:
        whole = op.new(size, _ATTENTION)  # rows lie apart: what arrives is put together
    del buffer
    return whole, ready if len(parts) == 1 and op.recording else None


def forward(layer: Layer, block: Block, hidden: T) -> tuple[T, T, T]:
    """(block output, attention output, log-sum-exp, which is empty where attention will run again)."""
    op, work = layer.op, layer.work
    with op.no_grad():
        whole, _ = heads_of_rows(layer, block, hidden)
        op.ledger.operation = "attention"
        out = op.new(work.query, _ATTENTION)
        scores = op.new(0 if layer.recomputes else work.scores, _ATTENTION)
        num_q = work.shape.num_heads // work.sp
        for _, parts in head_calls(work, layer.heads):
            for queries in parts:
                op.new(queries * work.query // num_q, _ATTENTION)
        del whole
        op.ledger.operation = "attention output exchanged"
        mixed = op.new(work.query, _ATTENTION) if work.sp > 1 or work.rows > 1 else out
        if work.sp > 1:
            mixed = op.new(work.query, _ATTENTION)
        del out
        output = op.new(work.hidden, _HIDDEN)
        for part in tiles(work.tokens, layer.tile):
            second_half(
                layer,
                block,
                op.view(hidden, part * hidden.size // work.tokens),
                op.view(mixed, part * mixed.size // work.tokens),
            )
    return output, mixed, scores


def keep(layer: Layer, tensors: list[T]) -> Kept:
    """On the host, or where they are."""
    return Kept([tensor.size for tensor in tensors], [] if layer.offload else tensors)


def fetch(layer: Layer, kept: Kept | None) -> None:
    """Back to the device."""
    if kept is not None and not kept.here:
        kept.here = [layer.op.new(size, _KEPT) for size in kept.sizes]


def backward_of(layer: Layer, block: Block, kept: Kept, following: Kept | None, grad: T) -> list[T | None]:
    """Gradients of the block's input and of its parameters. following: what the next block in backward keeps."""
    op, work, sums = layer.op, layer.work, Sums(layer.op, list(block.params.values()))
    op.ledger.operation = "what the layer kept comes back"
    fetch(layer, kept)
    hidden, mixed, scores = kept.here
    kept.here = []
    single = len(tiles(work.tokens, layer.tile)) == 1
    to_hidden = None if single else op.new(work.hidden, _HIDDEN)
    pair: T = op.new(2 * work.query, _ATTENTION)
    del mixed
    to_hidden = _second_halves(layer, block, hidden, grad, sums, to_hidden)
    op.ledger.operation = "attention output and its gradient exchanged"
    if work.sp > 1:
        received = op.new(2 * work.query, _ATTENTION)
        pair = received
        del received
    capture = Capture(sums.params) if single else None
    if capture is None:
        with op.no_grad():
            whole, ready = heads_of_rows(layer, block, hidden)
    else:
        with op.capturing(capture):
            whole, ready = heads_of_rows(layer, block, capture.input(hidden))
    _attention_backward(layer)
    del pair, scores
    op.ledger.operation = "what the next layer kept comes back"
    fetch(layer, following)
    op.ledger.operation = "gradients of q, k and v exchanged"
    grads = op.new(whole.size, _ATTENTION) if work.sp > 1 else whole
    del whole
    _first_halves(layer, block, hidden, sums, capture, ready)
    del grads, ready, capture
    op.ledger.operation = "gradients of the parameters"
    return [to_hidden, *sums.totals()]


def _second_halves(
    layer: Layer, block: Block, hidden: T, grad: T, sums: Sums, to_hidden: T | None
) -> T | None:
    """to_hidden: where several tiles write the gradient of the block's input; that of a single tile is returned."""
    op, work = layer.op, layer.work
    found: list[T | None] = []
    for part in tiles(work.tokens, layer.tile):
        capture = Capture(sums.params)
        own = op.new(part * work.query // work.tokens, _ATTENTION)
        with op.capturing(capture):
            one = capture.input(T(hidden.store, part * hidden.size // work.tokens))
            other = capture.input(own)
            output = second_half(layer, block, one, other)
        backward([(output, T(grad.store, one.size))])
        found = sums.add(capture)
        del output, one, other, own, capture
    return found[0] if to_hidden is None else to_hidden


def _first_halves(
    layer: Layer,
    block: Block,
    hidden: T,
    sums: Sums,
    capture: Capture | None,
    ready: tuple[T, T, T] | None,
) -> None:
    op, work = layer.op, layer.work
    found: list[T | None] = []
    for part in tiles(work.tokens, layer.tile):
        op.ledger.operation = "tile of norm, q, k and v"
        given = [op.new(part * size // work.tokens, _ATTENTION) for size in (work.query, work.key, work.key)]
        if capture is None:
            capture = Capture(sums.params)
            with op.capturing(capture):
                ready = first_half(
                    layer, block, capture.input(T(hidden.store, part * hidden.size // work.tokens))
                )
        assert ready is not None
        backward(list(zip(ready, given, strict=True)))
        found = sums.add(capture)
        capture = None
    found.clear()
    del ready


def _attention_backward(layer: Layer) -> None:
    """Gradients of one call at a time; those of a key/value head that takes several calls are summed in fp32."""
    op, work = layer.op, layer.work
    op.ledger.operation = "backward of attention"
    head = work.query // (work.shape.num_heads // work.sp)
    for kv, parts in head_calls(work, layer.heads):
        sums: list[list[T]] = []
        for number, queries in enumerate(parts):
            again = op.new(queries * head, _ATTENTION) if layer.recomputes else None
            found = [op.new(size, _ATTENTION) for size in (queries * head, kv * head, kv * head)]
            op.new(flash_scratch(work, queries * head, queries != kv), _ATTENTION)
            del again
            found.pop(0)
            if number == 0:
                sums.append(found)
            elif number == 1 and op.width != 4:
                sums[:] = [[op.new(op.wide(kv * head), _ATTENTION) for _ in range(2)]]
            del found
