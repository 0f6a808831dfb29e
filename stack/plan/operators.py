"""torch's operators by the sizes of what they make and keep: bf16 or fp16 of `width` 2, fp32 of 4.

Each follows torch 2.13 and transformers 5.24, operator by operator where a model computes in several. Scratch inside
kernels is not seen by torch either; that of FlashAttention's backward is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stack.plan.forecast import ATTENTION, GATHERED, HIDDEN, MLP, NORMS
from stack.plan.tensors import INDEX, Ledger, Node, Storage, T
from stack.plan.zero3 import Module, Param, Zero3

_ATTENTION, _GATHERED, _MLP, _NORMS, _HIDDEN = (
    INDEX[one] for one in (ATTENTION, GATHERED, MLP, NORMS, HIDDEN)
)


class Capture:
    """Gradients asked for by torch.autograd.grad: of `params`, and of the inputs made by `input`."""

    def __init__(self, params: Sequence[Param]):
        self.found: dict[Param, T] = {}
        self.inputs: list[T | None] = []
        self.nodes = {param: self._leaf(self._into_params(param)) for param in params if param.trained}

    @staticmethod
    def _leaf(sink: Callable[[T], None]) -> Node:
        def take(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            grad, grads[0] = grads[0], None
            assert grad is not None
            sink(grad)
            return ()

        node = Node("leaf", [], [], take)
        node.order = 1 << 62  # as torch runs them: at once
        return node

    def _into_params(self, param: Param) -> Callable[[T], None]:
        def sink(grad: T) -> None:
            self.found[param] = grad

        return sink

    def input(self, tensor: T) -> T:
        """A detached view that requires a gradient."""
        place = len(self.inputs)
        self.inputs.append(None)

        def sink(grad: T) -> None:
            self.inputs[place] = grad

        return T(tensor.store, tensor.size, self._leaf(sink))

    def close(self) -> list[T | None]:
        """Gradients of the inputs, in order. What was captured is let go, since nodes and capture hold each other."""
        found, self.inputs = self.inputs, []
        self.nodes.clear()
        self.found.clear()
        return found


class Operators:
    """All operators of one rank. fused_norms: RMSNorm is one kernel."""

    def __init__(self, ledger: Ledger, zero: Zero3, width: int, fused_norms: bool):
        self.ledger, self.zero, self.width, self.fused_norms = ledger, zero, width, fused_norms
        self.recording = True
        self.capture: Capture | None = None
        self._leaves: dict[Param, Node] = {}

    def new(self, size: int, part: int) -> T:
        return T(Storage(self.ledger, size, part), size)

    def wide(self, size: int) -> int:
        """Bytes of the same tensor in fp32."""
        return size * 4 // self.width

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        before, self.recording = self.recording, False
        yield
        self.recording = before

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[None]:
        """torch.enable_grad(), with gradients into `capture`."""
        before = self.recording, self.capture
        self.recording, self.capture = True, capture
        yield
        self.recording, self.capture = before

    def leaf(self, param: Param) -> Node:
        """What takes a parameter's gradient: `capture`, else the hook of ZeRO."""
        if self.capture is not None and param in self.capture.nodes:
            return self.capture.nodes[param]
        node = self._leaves.get(param)
        if node is None:
            node = self._leaves[param] = Capture._leaf(lambda grad: self._take(param, grad))
        return node

    def _take(self, param: Param, grad: T) -> None:
        if param.in_leaf:
            param.grad = grad  # its module hands it on when it is done
        else:
            self.zero.take_grad(param, grad)

    def record(
        self,
        label: str,
        inputs: Sequence[T | Param],
        output: T,
        saved: list[T],
        back: Callable[[list[T], list[T | None]], Sequence[T | None]],
    ) -> T:
        """Give `output` a place in the graph if an input has one."""
        if not self.recording:
            return output
        edges: list[tuple[Node, int] | None] = []
        for one in inputs:
            if isinstance(one, Param):
                edges.append((self.leaf(one), 0) if one.trained else None)
            else:
                edges.append(None if one.node is None else (one.node, one.index))
        if any(edge is not None for edge in edges):
            output.node = Node(label, edges, saved, back)
        return output

    def forget_leaves(self) -> None:
        """At the end of a backward pass: the graph that led to them is gone."""
        self._leaves.clear()

    def view(self, of: T, size: int | None = None) -> T:
        """The same memory; its gradient is a view of the gradient."""
        output = T(of.store, of.size if size is None else size)
        return self.record("view", [of], output, [], lambda saved, grads: [grads[0]])

    def copy(self, of: T, part: int) -> T:
        """`.contiguous()` that copies, forward; its gradient is a view."""
        output = self.new(of.size, part)
        return self.record("copy", [of], output, [], lambda saved, grads: [grads[0]])

    def call(self, module: Module, run: Callable[[T], T], hidden: T, stops: bool = False) -> T:
        """A module with DeepSpeed's hooks. stops: a recomputation ends inside it, so that nothing behind it happens, and its
        hook for backward has run before (`blocks.entered_before`)."""
        self.zero.fetch(module)

        def leave(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            if module.leaf:
                for param in module.params:
                    if param.grad is not None:
                        self.zero.take_grad(param, param.grad)
            self.zero.release(module)
            return [grads[0]]

        hidden = self.record(module.name, [hidden], T(hidden.store, hidden.size), [], leave)
        output = run(hidden)
        if stops:
            return output
        self.zero.release(module)
        return self.behind(module, output)

    def behind(self, module: Module, output: T) -> T:
        """DeepSpeed's hook on a module's output, which fetches it for backward."""

        def enter(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            self.zero.fetch(module)
            return [grads[0]]

        return self.record(module.name, [output], T(output.store, output.size), [], enter)

    def linear(self, hidden: T, param: Param, size: int, part: int) -> T:
        """[tokens, inputs] x weight -> `size` bytes."""
        output, wants, given = self.new(size, part), hidden.node is not None, hidden.size

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            self.ledger.operation = f"backward of {param.name}"
            to_input = self.new(given, part) if wants else None
            to_weight = self.new(param.numel * self.width, _GATHERED) if param.trained else None
            return [to_input, to_weight]

        return self.record("linear", [hidden, param], output, [hidden], back)

    def add(self, one: T, other: T, part: int, empty: bool = False) -> T:
        """Both get the same gradient. empty: the sum itself is never made."""
        output = self.new(0 if empty else one.size, part)
        return self.record("add", [one, other], output, [], lambda saved, grads: [grads[0], grads[0]])

    def silu(self, gate: T, part: int) -> T:
        size = gate.size
        return self.record(
            "silu", [gate], self.new(size, part), [gate], lambda saved, grads: [self.new(size, part)]
        )

    def multiply(self, one: T, other: T, part: int) -> T:
        size = one.size
        output = self.new(size, part)

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            return [self.new(size, part), self.new(size, part)]

        return self.record("mul", [one, other], output, [one, other], back)

    def norm(self, hidden: T, param: Param, rows: int) -> T:
        """RMSNorm over `rows` vectors: one kernel, or transformers' five operators in fp32."""
        self.ledger.operation = f"{param.name}"
        return self._fused_norm(hidden, param, rows) if self.fused_norms else self._eager_norm(hidden, param)

    def _fused_norm(self, hidden: T, param: Param, rows: int) -> T:
        size = hidden.size
        output, scale = self.new(size, _NORMS), self.new(4 * rows, _NORMS)

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            self.ledger.operation = f"backward of {param.name}"
            return [self.new(size, _NORMS), self.new(param.numel * self.width, _GATHERED)]

        return self.record("norm", [hidden, param], output, [hidden, scale], back)

    def _eager_norm(self, hidden: T, param: Param) -> T:
        """float, square and mean, times its root, back to 16 bit, times the weight. In fp32 nothing is converted."""
        size, converts = hidden.size, self.width != 4
        full = self.wide(size)
        wide = self.new(full, _NORMS) if converts else T(hidden.store, size)
        self.new(full, _NORMS)  # the square, gone after the mean
        normed = self.new(full, _NORMS)
        if not self.recording:
            del wide  # the name is used again, and nothing else holds it
            wide = normed
        narrow = self.new(size, _NORMS) if converts else normed
        output = self.new(size, _NORMS)

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            self.ledger.operation = f"backward of {param.name}"
            to_narrow = self.new(size, _NORMS)
            self.new(size, _NORMS)  # the weight's gradient before it is summed over tokens
            saved.pop()
            grads[0] = None
            to_normed = self.new(full, _NORMS) if converts else to_narrow
            del to_narrow
            to_wide = self.new(full, _NORMS)
            self.new(full, _NORMS)  # the root's gradient before it is summed
            del to_normed
            of_mean = self.new(full, _NORMS)
            power, doubled = self.new(full, _NORMS), self.new(full, _NORMS)
            squared = self.new(full, _NORMS)
            del power, doubled, of_mean, squared
            saved.clear()
            weight = self.new(param.numel * self.width, _GATHERED) if param.trained else None
            return [self.new(size, _NORMS) if converts else to_wide, weight]

        return self.record("norm", [hidden, param], output, [wide, narrow], back)

    def rotary(self, heads: T) -> T:
        """x * cos + rotated x * sin; cos and sin are kept anyway."""
        size = heads.size
        turned = self.new(size, _ATTENTION)
        self.new(size // 2, _ATTENTION)
        rotated = self.new(size, _ATTENTION)
        product = self.new(size, _ATTENTION)
        del rotated
        output = self.new(size, _ATTENTION)
        del turned, product

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            self.ledger.operation = "backward of the rotary embedding"
            of_sine = self.new(size, _ATTENTION)
            half = self.new(size // 2, _ATTENTION)
            first = self.new(size, _ATTENTION)
            del half
            second = self.new(size, _ATTENTION)
            del of_sine, second
            cosine = self.new(size, _ATTENTION)
            del cosine
            return [first]

        return self.record("rotary", [heads], output, [], back)
