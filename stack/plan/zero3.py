"""Which whole parameters and gradients are on the device at each moment under ZeRO-3: DeepSpeed's coordinator replayed.

The rules are those of DeepSpeed 0.19 (runtime/zero/partitioned_param_coordinator.py, partition_parameters.py, stage3.py): a
module's parameters are gathered before it runs, together with the next ones up to `stage3_prefetch_bucket_size`, and let go
behind it unless they come again within `stage3_max_reuse_distance`. Several parameters travel in one buffer, out of which
each is copied; that buffer stays until the last of them is asked for. Gradients collect in a bucket and are reduced in fp32.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stack.plan.forecast import BUCKETS, GATHERED, GRADIENTS
from stack.plan.tensors import INDEX, Ledger, Storage, T

_GATHERED, _BUCKETS, _GRADIENTS = INDEX[GATHERED], INDEX[BUCKETS], INDEX[GRADIENTS]
NEVER = -(10**10)


@dataclass(eq=False)
class Param:
    """One parameter. numel: of the whole. trained: it gets a gradient."""

    name: str
    numel: int
    trained: bool = True
    persistent: bool = False
    in_leaf: bool = False
    data: Storage | None = None
    handle: Handle | None = None
    grad: T | None = None
    users: set[int] = field(default_factory=set)
    fetched_for: int = NEVER


@dataclass(eq=False)
class Handle:
    """A gather under way. buffer: what several parameters arrive in. copied: they have been taken out of it; DeepSpeed does
    so once, for all of them, when the first is asked for, so that one let go since then does not come back with another."""

    params: list[Param]
    buffer: Storage
    copied: bool = False


@dataclass(eq=False)
class Module:
    """params: what is gathered before it runs: its own parameters, of a leaf all below it. below: all below it, for a
    container, which has none of its own."""

    name: str
    params: list[Param]
    leaf: bool = False
    below: list[Param] = field(default_factory=list)
    owner: int = 0

    def __post_init__(self) -> None:
        self.owner = id(self)
        self.below = self.below or self.params
        self.own = [] if self.leaf else self.params
        self.below_numel = sum(param.numel for param in self.below)
        self.own_numel = sum(param.numel for param in self.own)


@dataclass(frozen=True)
class ZeroSettings:
    """Elements, as in the DeepSpeed file. widths: bytes of an element."""

    world: int
    width: int
    prefetch: int = 50_000_000
    persistence: int = 100_000
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    bucket: int = 500_000_000
    reduce_width: int = 4
    gathers: bool = True
    """False: parameters are whole anyway (stages 0 to 2)."""
    away: bool = False
    """Parameters wait in host memory: even a single rank copies them."""


class Zero3:
    """One rank's coordinator. `traffic` counts elements gathered and reduced in a step."""

    def __init__(self, ledger: Ledger, settings: ZeroSettings):
        self.ledger, self.settings = ledger, settings
        self.order: list[Module] = []
        self.queue: deque[tuple[Param, int]] = deque()
        self.trace: list[tuple[Param, int]] | None = None
        self.step = self.available = 0
        self.in_bucket: list[Param] = []
        self.bucket_elements = 0
        self.gathered_bytes = self.reduced_bytes = 0
        self._near: dict[tuple[int, bool], set[Param]] = {}

    def start_step(self) -> None:
        """The first step records the order of modules; from the second on it is known."""
        if self.order and self.trace is None:
            self.trace = [(param, step) for step, module in enumerate(self.order) for param in module.params]
        self.queue = deque(self.trace or [])
        for module in self.order:
            for param in module.params:
                param.fetched_for = NEVER
        self.step = self.available = 0
        self.gathered_bytes = self.reduced_bytes = 0

    def fetch(self, module: Module) -> None:
        """Before a module runs, forward or backward."""
        if not self.settings.gathers:
            return
        if self.trace is None:
            self.order.append(module)
        self._gather([param for param in module.params if param.data is None and param.handle is None])
        for param in module.params:
            param.users.add(module.owner)
            if param.handle is not None:
                self._wait(param)
        if self.trace is not None:
            self._take_from_queue(module)
            self._prefetch()
        self.step += 1

    def release(self, module: Module) -> None:
        """Behind it."""
        if not self.settings.gathers:
            return
        near = self._near_params(module.leaf) if self.trace is not None else set()
        for param in module.params:
            param.users.discard(module.owner)
            keep = self.trace is not None and (
                param.persistent or param.fetched_for > self.step or param in near
            )
            if not keep and not param.users and param.data is not None and not param.persistent:
                param.data = None
                self.available -= param.numel

    def end_backward(self) -> None:
        """What was gathered and has no gradient hook of its own is let go; the bucket is emptied."""
        for module in {id(module): module for module in self.order}.values():
            for param in module.params:
                param.users.clear()
                if not param.persistent:
                    param.data, param.handle = None, None
        self.reduce()

    def _near_params(self, leaf: bool) -> set[Param]:
        """Those that come again within the reuse distance. For a leaf DeepSpeed looks below the modules that follow, so
        that a container among them keeps all that it holds."""
        found = self._near.get((self.step, leaf))
        if found is None:
            found, traversed = set(), 0
            for module in self.order[self.step :]:
                if traversed >= self.settings.max_reuse:
                    break
                found.update(module.below if leaf else module.own)
                traversed += module.below_numel if leaf else module.own_numel
            self._near[self.step, leaf] = found
        return found

    def _take_from_queue(self, module: Module) -> None:
        missing = {param for param in module.params if param.fetched_for < self.step}
        taken: set[Param] = set()
        while self.queue and len(taken) < len(missing):
            param, used_at = self.queue.popleft()
            param.fetched_for = used_at
            taken.add(param)

    def _prefetch(self) -> None:
        room = min(self.settings.max_live - self.available, self.settings.prefetch)
        wanted: dict[Param, None] = {}
        elements = 0
        while self.queue and elements < room:
            param, used_at = self.queue.popleft()
            param.fetched_for = max(param.fetched_for, used_at)
            if param.data is None and param.handle is None and param not in wanted:
                wanted[param] = None
                elements += param.numel
        self._gather(list(wanted))

    def _gather(self, params: list[Param]) -> None:
        if not params:
            return
        self.available += sum(param.numel for param in params)
        world, width = self.settings.world, self.settings.width
        sizes = [-(-param.numel // world) * world * width for param in params]
        self.gathered_bytes += sum(sizes)
        if world == 1:  # each by itself: a copy from the host, or the part that is the whole, where it lies
            for param, size in zip(params, sizes, strict=True):
                param.handle = Handle(
                    [param], Storage(self.ledger, size if self.settings.away else 0, _GATHERED)
                )
            return
        handle = Handle(list(params), Storage(self.ledger, sum(sizes), _GATHERED))
        for param in params:
            param.handle = handle

    def _wait(self, asked: Param) -> None:
        handle = asked.handle
        assert handle is not None
        if len(handle.params) == 1:
            asked.data, asked.handle = handle.buffer, None
            return
        if not handle.copied:
            for param in handle.params:
                param.data = Storage(self.ledger, param.numel * self.settings.width, _GATHERED)
            handle.copied = True
        asked.handle = None

    def take_grad(self, param: Param, grad: T) -> None:
        """The hook behind a gradient that is complete."""
        if self.in_bucket and self.bucket_elements + param.numel > self.settings.bucket:
            self.reduce()
        if self.bucket_elements + param.numel <= self.settings.bucket:
            param.grad = None  # it lies in the bucket, which is there all the time
        else:
            param.grad = grad
        self.in_bucket.append(param)
        self.bucket_elements += param.numel

    def reduce(self) -> None:
        """Scatter what is in the bucket: a copy in the type of communication, and one in the order of the ranks."""
        if not self.in_bucket:
            return
        width, world = self.settings.reduce_width, self.settings.world
        wide = []
        for param in self.in_bucket:
            if param.grad is not None and width != self.settings.width:
                wide.append(Storage(self.ledger, param.numel * width, _BUCKETS))
        padded = sum(-(-param.numel // world) * world * width for param in self.in_bucket)
        alone = len(self.in_bucket) == 1 and self.in_bucket[0].numel % world == 0
        joined = None if alone else Storage(self.ledger, padded, _BUCKETS)
        self.reduced_bytes += padded
        for param in self.in_bucket:
            param.grad = None
        del wide, joined
        self.in_bucket, self.bucket_elements = [], 0
