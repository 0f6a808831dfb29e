"""The forms in which a block runs: plain, checkpointed, with a tiled MLP, lean. See stack/parallel/apply.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stack.plan import lean
from stack.plan.blocks import Block, Work, attention_half, entered_before, mlp, run_in
from stack.plan.forecast import HIDDEN, KEPT, MLP
from stack.plan.operators import Capture, Operators
from stack.plan.tensors import INDEX, T, backward
from stack.plan.zero3 import Param

_KEPT, _MLP, _HIDDEN = INDEX[KEPT], INDEX[MLP], INDEX[HIDDEN]


@dataclass
class Form:
    """How every block runs. mlp_tile: tokens, or None for whole MLPs."""

    op: Operators
    work: Work
    checkpointing: bool
    offload: bool
    mlp_tile: int | None
    lean: lean.Layer | None
    kept: list[lean.Kept] = field(default_factory=list)

    def run(self, block: Block, hidden: T) -> T:
        """Forward of one block, with its place in the graph."""
        if self.lean is not None:
            return self.op.call(
                block.modules["block"], lambda x, layer=self.lean: self._lean(layer, block, x), hidden
            )
        run = self._checkpointed if self.checkpointing else self._plain
        return self.op.call(block.modules["layer"], lambda x: run(block, x), hidden)

    def _plain(self, block: Block, hidden: T, again: bool = False) -> T:
        """again: a recomputation, which ends as soon as what backward needs is there."""
        op, work = self.op, self.work
        middle = attention_half(op, work, block, hidden)
        del hidden
        normed = run_in(
            op,
            block,
            "post_attention_layernorm",
            lambda x: op.norm(x, block["post_attention_layernorm"], work.tokens),
            middle,
        )
        if self.mlp_tile is None:
            out = run_in(
                op, block, "mlp", lambda x: mlp(op, work, block, x, stops=again), normed, stops=again
            )
        else:
            module, params = block.modules["mlp"], block.modules["mlp"].params
            tile = self.mlp_tile
            out = op.call(
                module,
                lambda x: tiled(
                    op, x, lambda part: mlp(op, work, block, part), params, tile, work, runs=not again
                ),
                normed,
                stops=again,
            )
        del normed
        return op.add(middle, out, _HIDDEN, empty=again)

    def _checkpointed(self, block: Block, hidden: T) -> T:
        op = self.op
        layer = op.ledger.layer
        with op.no_grad():
            output = self._plain(block, hidden)

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            op.ledger.layer, op.ledger.operation = layer, "the layer's input comes back"
            for module in entered_before(block):
                op.zero.fetch(module)
            capture = Capture([])
            given = op.new(self.work.hidden, _KEPT) if self.offload else saved[0]
            with op.capturing(capture):
                source = capture.input(given)
                del given
                again = self._plain(block, source, again=True)
                del source
            grad = grads[0]
            assert grad is not None
            roots = [(again, grad)]
            grads.clear()
            del grad, again
            backward(roots)
            return capture.close()

        return op.record("checkpoint", [hidden], output, [] if self.offload else [hidden], back)

    def _lean(self, layer: lean.Layer, block: Block, hidden: T) -> T:
        op = self.op
        label = op.ledger.layer
        output, mixed, scores = lean.forward(layer, block, hidden)
        if not op.recording:
            return output
        kept = lean.keep(layer, [hidden, mixed, scores])
        self.kept.append(kept)
        del mixed, scores

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            op.ledger.layer = label
            self.kept.remove(kept)
            grad = grads[0]
            assert grad is not None
            return lean.backward_of(layer, block, kept, self.kept[-1] if self.kept else None, grad)

        params = [param for param in block.params.values() if param.trained]
        return op.record("lean", [hidden, *params], output, [], back)


def tiled(
    op: Operators,
    hidden: T,
    run: Callable[[T], T],
    params: Sequence[Param],
    tile: int,
    work: Work,
    runs: bool = True,
) -> T:
    """`ops/tiled_mlp.py`: only the input is kept, each tile is run again in backward. runs: False where a recomputation
    stops before the tiles."""
    size, parts = hidden.size, lean.tiles(work.tokens, tile)
    params = [param for param in params if param.trained]

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        sums = lean.Sums(op, params)
        to_hidden = op.new(size, _MLP)
        found: list[T | None] = []
        for part in parts:
            capture = Capture(params)
            with op.capturing(capture):
                one = capture.input(T(saved[0].store, part * size // work.tokens))
                output = run(one)
            grad = grads[0]
            assert grad is not None
            backward([(output, T(grad.store, one.size))])
            found = sums.add(capture)
            del output, one, capture
        found.clear()
        return [to_hidden, *sums.totals()]

    output = op.new(size if runs else 0, _MLP)
    if runs:
        with op.no_grad():
            for part in parts:
                run(T(hidden.store, part * size // work.tokens))
    return op.record("tiled", [hidden, *params], output, [hidden], back)
