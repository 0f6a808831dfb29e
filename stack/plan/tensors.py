"""Tensors that are nothing but a size, with autograd: what a step's tensors are born for, and when they die.

A forecast writes a layer down as torch runs it, with these in place of tensors. Python's own reference counts decide how
long each lives, as they do for real ones; the ledger sums up what is alive, by category. 36 layers take a tenth of a
second.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Sequence

from stack.plan.forecast import CATEGORIES, Peak

INDEX = {category: index for index, category in enumerate(CATEGORIES)}


class Ledger:
    """Bytes alive now, and at each phase's peak. highest: of each category at any time."""

    def __init__(self) -> None:
        self.live = 0
        self.parts = [0] * len(CATEGORIES)
        self.highest = [0] * len(CATEGORIES)
        self.phase, self.layer, self.operation = "", "", ""
        self._most: dict[str, tuple[int, list[int], str, str]] = {}
        self._top = 0

    def add(self, num_bytes: int, part: int) -> None:
        self.live += num_bytes
        self.parts[part] += num_bytes
        if self.parts[part] > self.highest[part]:
            self.highest[part] = self.parts[part]
        if self.live > self._top:
            self._top = self.live
            self._most[self.phase] = self.live, self.parts.copy(), self.layer, self.operation

    def enter(self, phase: str) -> None:
        self.phase = phase
        found = self._most.get(phase)
        self._top = found[0] if found else 0
        self.add(0, 0)

    def restart(self) -> None:
        """Forget the peaks so far."""
        self._most.clear()

    def peaks(self) -> dict[str, Peak]:
        return {
            phase: Peak(
                most,
                {name: size for name, size in zip(CATEGORIES, parts, strict=True) if size},
                layer,
                operation,
            )
            for phase, (most, parts, layer, operation) in self._most.items()
        }


class Storage:
    """Memory of one or several views; counted until the last of them goes."""

    __slots__ = ("ledger", "num_bytes", "part")

    def __init__(self, ledger: Ledger, num_bytes: int, part: int):
        self.ledger, self.num_bytes, self.part = ledger, num_bytes, part
        ledger.add(num_bytes, part)

    def __del__(self) -> None:
        self.ledger.live -= self.num_bytes
        self.ledger.parts[self.part] -= self.num_bytes


class T:
    """A tensor: `size` bytes of a storage. node, index: what made it, where gradients are wanted."""

    __slots__ = ("index", "node", "size", "store")

    def __init__(self, store: Storage, size: int, node: Node | None = None, index: int = 0):
        self.store, self.size, self.node, self.index = store, size, node, index


Backward = Callable[[list[T], list[T | None]], Sequence[T | None]]
"""(saved, gradients of the outputs) -> gradients of the inputs."""


class Node:
    """A step of the graph. inputs: (node, output) of each input, None where it needs no gradient."""

    __slots__ = ("backward", "inputs", "label", "number", "order", "outputs", "saved")
    _order = itertools.count()

    def __init__(self, label: str, inputs: list[tuple[Node, int] | None], saved: list[T], backward: Backward):
        self.label, self.inputs, self.saved, self.backward = label, inputs, saved, backward
        self.number = self.order = next(Node._order)
        self.outputs = 1


def backward(roots: list[tuple[T, T]]) -> None:
    """Run gradients from (output, its gradient) to the leaves, in torch's order: what was made last comes first.

    A node's saved tensors go when it has run. `roots` is emptied, so that the gradients go as soon as they are used.
    """
    waiting: dict[Node, int] = {}
    stack = [root.node for root, _ in roots if root.node is not None]
    seen = set(stack)
    while stack:
        for edge in stack.pop().inputs:
            if edge is not None:
                waiting[edge[0]] = waiting.get(edge[0], 0) + 1
                if edge[0] not in seen:
                    seen.add(edge[0])
                    stack.append(edge[0])
    seen.clear()
    buffers: dict[Node, list[T | None]] = {}
    ready: list[tuple[int, int, Node]] = []
    for root, grad in roots:
        if root.node is not None:
            _give(buffers, root.node, root.index, grad)
            if not waiting.get(root.node) and all(node is not root.node for *_, node in ready):
                heapq.heappush(ready, (-root.node.order, root.node.number, root.node))
    roots.clear()
    del root, grad
    while ready:
        *_, node = heapq.heappop(ready)
        _run(node, buffers, waiting, ready)


def _run(
    node: Node,
    buffers: dict[Node, list[T | None]],
    waiting: dict[Node, int],
    ready: list[tuple[int, int, Node]],
) -> None:
    grads = buffers.pop(node, [None])
    made = list(node.backward(node.saved, grads)) if any(grad is not None for grad in grads) else []
    node.saved = []
    grads.clear()
    for place, edge in enumerate(node.inputs):
        grad, made_here = (made[place], True) if place < len(made) else (None, False)
        if made_here:
            made[place] = None
        if edge is None:
            continue
        target, index = edge
        if grad is not None:
            _give(buffers, target, index, grad)
        grad = None
        waiting[target] -= 1
        if not waiting[target]:
            heapq.heappush(ready, (-target.order, target.number, target))


def _give(buffers: dict[Node, list[T | None]], node: Node, index: int, grad: T) -> None:
    """Add to the gradient that waits for `node`, in place where nobody else looks at it."""
    slots = buffers.setdefault(node, [None] * node.outputs)
    before = slots[index]
    if before is None:
        slots[index] = T(grad.store, grad.size)
        return
    # The storage is held by `before` and, for the moment, by the argument of getrefcount.
    if sys.getrefcount(before.store) > 2:
        slots[index] = T(Storage(before.store.ledger, before.size, before.store.part), before.size)
