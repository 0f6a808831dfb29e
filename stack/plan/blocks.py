"""A decoder block as torch runs it: transformers' modules around this stack's attention (stack/parallel/ulysses.py).

`stack/plan/lean.py` has the lean layer, which runs the same halves in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stack.plan.forecast import ATTENTION, GATHERED, HIDDEN, MLP
from stack.plan.operators import Operators
from stack.plan.shape import Shape
from stack.plan.tensors import INDEX, T
from stack.plan.zero3 import Module, Param

_ATTENTION, _MLP, _HIDDEN, _GATHERED = INDEX[ATTENTION], INDEX[MLP], INDEX[HIDDEN], INDEX[GATHERED]


@dataclass(frozen=True)
class Work:
    """What a rank works on: tokens of its slice, and how attention shares heads.

    kv_local: key/value heads a rank holds in attention, repeated ones counted; documents: in a row.
    """

    shape: Shape
    tokens: int
    rows: int
    sp: int
    width: int
    kv_local: int
    documents: int
    attention: str

    @property
    def hidden(self) -> int:
        """Bytes of the slice's hidden states."""
        return self.tokens * self.shape.hidden * self.width

    @property
    def query(self) -> int:
        """Bytes of all heads on the slice, which are those of a rank's heads on the whole row."""
        return self.tokens * self.shape.num_heads * self.shape.head_dim * self.width

    @property
    def key(self) -> int:
        """Of the key heads as projected, on the slice."""
        return self.tokens * self.shape.num_kv_heads * self.shape.head_dim * self.width

    @property
    def key_spread(self) -> int:
        """Of a rank's key heads on the whole rows."""
        return self.tokens * self.sp * self.kv_local * self.shape.head_dim * self.width

    @property
    def scores(self) -> int:
        """Of the log-sum-exp, fp32, a number a query and head."""
        return 4 * self.tokens * self.shape.num_heads

    @property
    def grouped(self) -> bool:
        """A rank has fewer key/value heads than query heads."""
        return self.kv_local < self.shape.num_heads // self.sp


@dataclass
class Block:
    """Parameters of one block, by the last part of their names, and its modules."""

    params: dict[str, Param]
    modules: dict[str, Module]

    def __getitem__(self, name: str) -> Param:
        return self.params[name]


def run_in(
    operators: Operators, block: Block, name: str, run: Callable[[T], T], hidden: T, stops: bool = False
) -> T:
    """Through a module's hooks, unless the block is a leaf, whose modules have none."""
    module = block.modules.get(name)
    return run(hidden) if module is None else operators.call(module, run, hidden, stops)


def entered_before(block: Block) -> list[Module]:
    """The modules of a checkpointed block that backward enters before it asks for a kept tensor, upon which the block runs
    again: their gathers come first."""
    return [block.modules[name] for name in ("mlp", "down_proj") if name in block.modules]


def project(op: Operators, work: Work, block: Block, hidden: T) -> tuple[T, T, T]:
    """q, k and v with rotary embedding, from normed hidden states of any number of tokens."""
    shape = work.shape
    tokens = hidden.size // (shape.hidden * work.width)
    dim = shape.head_dim * work.width
    found = []
    for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads)):
        part = run_in(
            op, block, f"{name}_proj",
            lambda x, name=name, heads=heads: op.linear(x, block[f"{name}_proj"], tokens * heads * dim, _ATTENTION),
            hidden,
        )  # fmt: skip
        if shape.head_norms:
            part = run_in(
                op, block, f"{name}_norm",
                lambda x, name=name, heads=heads: op.norm(x, block[f"{name}_norm"], tokens * heads),
                part,
            )  # fmt: skip
        found.append(part)
        del part
    value = run_in(
        op,
        block,
        "v_proj",
        lambda x: op.linear(x, block["v_proj"], tokens * shape.num_kv_heads * dim, _ATTENTION),
        hidden,
    )
    key = found.pop()
    query = found.pop()
    turned = op.rotary(query)
    key = op.rotary(key)
    return turned, key, value


def attend(op: Operators, work: Work, query: T, key: T, value: T) -> T:
    """Exchange, flash attention document by document, exchange back; attention output on the slice."""
    if work.sp > 1:
        query, key, value = _to_heads(op, work, query, key, value)
    out = _flash(op, work, query, key, value)
    del query, key, value
    op.ledger.operation = "attention, its output exchanged"
    if work.sp > 1:
        sent = op.copy(out, _ATTENTION)
        received = _exchanged(op, sent, contiguous=False)
        del sent, out
        out = received
        del received
    return op.copy(out, _ATTENTION)


def _to_heads(op: Operators, work: Work, query: T, key: T, value: T) -> tuple[T, T, T]:
    op.ledger.operation = "q, k and v exchanged"
    if work.key_spread != key.size:
        key, value = (_picked(op, part, work.key_spread) for part in (key, value))
    sizes = [query.size, work.key_spread, work.key_spread]
    joined = _joined(op, [query, key, value], sizes, copies=(True, True, True))
    received = _exchanged(op, joined, contiguous=True)
    del joined
    whole = op.copy(received, _ATTENTION)
    del received
    return _split(op, whole, sizes)


def _picked(op: Operators, part: T, size: int) -> T:
    """Heads that go to several ranks, repeated."""
    given = part.size
    return op.record("pick", [part], op.new(size, _ATTENTION), [], lambda s, g: [op.new(given, _ATTENTION)])


def _joined(op: Operators, parts: list[T], sizes: list[int], copies: tuple[bool, ...]) -> T:
    """torch.cat; the gradients are narrow views, which a view of other axes copies."""

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        return [op.new(size, _ATTENTION) for size, copied in zip(sizes, copies, strict=True) if copied]

    return op.record("cat", parts, op.new(sum(sizes), _ATTENTION), [], back)


def _exchanged(op: Operators, sent: T, contiguous: bool) -> T:
    """dist.collectives.all_to_all. contiguous: in forward; the gradient of the other direction is then not, and copied."""
    size = sent.size

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.operation = "gradients exchanged"
        grad = op.new(size, _ATTENTION)
        received = op.new(size, _ATTENTION)
        del grad
        return [received]

    return op.record("all-to-all", [sent], op.new(size, _ATTENTION), [], back)


def _split(op: Operators, whole: T, sizes: list[int]) -> tuple[T, T, T]:
    """Views of q, k and v; their gradients are joined again."""
    total = whole.size
    parts = [T(whole.store, size) for size in sizes]
    first = op.record("split", [whole], parts[0], [], lambda s, g: [op.new(total, _ATTENTION)])
    if first.node is not None:
        first.node.outputs = 3
        for index, part in enumerate(parts):
            part.node, part.index = first.node, index
    return parts[0], parts[1], parts[2]


def _flash(op: Operators, work: Work, query: T, key: T, value: T) -> T:
    """One kernel a document, joined by two copies; the log-sum-exp is kept."""
    op.ledger.operation = "attention"
    size, kv = query.size, key.size
    out, scores = op.new(size, _ATTENTION), op.new(work.scores, _ATTENTION)
    scratch = flash_scratch(work, size)

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.operation = "backward of attention"
        found = [op.new(size, _ATTENTION), op.new(kv, _ATTENTION), op.new(kv, _ATTENTION)]
        op.new(scratch, _ATTENTION)
        if work.documents > 1 and work.attention == "sdpa":
            # A document's gradients lie in zeros of the whole row, which are then added up.
            op.new(size + 2 * kv, _ATTENTION)
        return found

    made = op.record(
        "attention", [query, key, value], T(out.store, size), [query, key, value, out, scores], back
    )
    if work.attention != "sdpa":
        return made
    inner = op.copy(made, _ATTENTION)
    return op.copy(inner, _ATTENTION)


def flash_scratch(work: Work, query: int, grouped: bool | None = None) -> int:
    """FlashAttention 2's own in backward (csrc/flash_attn/flash_api.cpp): dq in fp32, a number a query, and with fewer
    key/value heads dk and dv of all query heads. query: bytes."""
    numbers = query // work.width
    scratch = 4 * numbers + 4 * numbers // work.shape.head_dim
    return scratch + (2 * query if (work.grouped if grouped is None else grouped) else 0)


def mlp(op: Operators, work: Work, block: Block, hidden: T, stops: bool = False) -> T:
    """down(silu(gate) * up), or the experts of `stack/plan/experts.py`. stops: a recomputation ends in the last of it."""
    shape = work.shape
    if shape.num_experts:
        from stack.plan.experts import experts

        return experts(op, work, block, hidden, stops)
    op.ledger.operation = "MLP"
    tokens = hidden.size // (shape.hidden * work.width)
    width = tokens * shape.intermediate * work.width
    gate = run_in(op, block, "gate_proj", lambda x: op.linear(x, block["gate_proj"], width, _MLP), hidden)
    active = run_in(op, block, "act_fn", lambda x: op.silu(x, _MLP), gate)
    del gate
    up = run_in(op, block, "up_proj", lambda x: op.linear(x, block["up_proj"], width, _MLP), hidden)
    product = op.multiply(active, up, _MLP)
    del active, up
    return run_in(
        op,
        block,
        "down_proj",
        lambda x: op.linear(x, block["down_proj"], hidden.size, _MLP),
        product,
        stops=stops,
    )


def attention_half(op: Operators, work: Work, block: Block, hidden: T) -> T:
    """x + o(attention(norm(x)))"""
    op.ledger.operation = "q, k and v"
    normed = run_in(
        op, block, "input_layernorm", lambda x: op.norm(x, block["input_layernorm"], work.tokens), hidden
    )
    out = run_in(op, block, "self_attn", lambda x: _attention(op, work, block, x), normed)
    del normed
    return op.add(hidden, out, _HIDDEN)


def _attention(op: Operators, work: Work, block: Block, normed: T) -> T:
    query, key, value = project(op, work, block, normed)
    mixed = attend(op, work, query, key, value)
    op.ledger.operation = "output projection"
    return run_in(op, block, "o_proj", lambda x: op.linear(x, block["o_proj"], normed.size, _HIDDEN), mixed)
