"""Two steps of one rank, counted: bytes at the most in every phase and what they were, FLOPs, bytes communicated.

Model, parallelism, DeepSpeed's engine and optimizer are the ones of a run, called as a run calls them. On real ranks the
tensors are real (`tests/parity/test_exact.py`), in `exact.py` they are fake (shapes without numbers) and one process stands
for all ranks. The two agree to the byte, since every operator's results are seen as they are made, and every storage is
counted from its birth to its end.

Real ranks are made to forget as a GPU does: behind each collective they wait until gloo's threads have let go of its
tensors, which else they hold for a moment that depends on the machine's mood.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from stack.bench.calls import count_flops, is_product
from stack.bench.gloo import gloo_bytes, holders_of_all, until_let_go
from stack.bench.live_bytes import LiveBytes
from stack.bench.traffic import EXCHANGES, collective
from stack.bench.virtual_device import VIRTUAL
from stack.bench.where import Site, Sites
from stack.config import derive
from stack.config.schema import RunConfig
from stack.data.batch import MicroBatch
from stack.dist.topology import Topology
from stack.models import spec as model_spec
from stack.plan.forecast import ATTENTION, BUCKETS, GATHERED, GRADIENTS, OTHER, PARAMETERS

if TYPE_CHECKING:
    from stack.engine.handle import Engine

SMALL = 1 << 12
"""Bytes below which a tensor's line is not looked up."""

aten = torch.ops.aten
WRITTEN_IN_PLACE = {
    ("IndexBackward0", aten.index_put.default): aten.index_put_.default,
    ("GatherBackward0", aten.scatter_add.default): aten.scatter_add_.default,
    ("TopkBackward0", aten.scatter.src): aten.scatter_.src,
}
"""By node of the graph: gradients that torch writes into fresh zeros, but into a copy of them where a dispatch mode looks on,
as here (areAnyTensorSubclassLike in torch/csrc/autograd/FunctionsManual.cpp and ATen)."""

SCALAR, EQUAL, EMPTY = aten._local_scalar_dense.default, aten.equal.default, aten.empty.memory_format

FAKE = torch._C._TorchDispatchModeKey.FAKE

SCRATCH = Site(ATTENTION, "inside FlashAttention's backward: dq in fp32, dk and dv of all query heads")


class _Traits(NamedTuple):
    """What has to be known of an operator at each of its 100,000 calls, looked up once."""

    exchanges: bool
    product: bool
    copies: bool
    rewritten: bool
    """Whether it is one of `WRITTEN_IN_PLACE`."""

    @classmethod
    def of(cls, func: Any) -> _Traits:
        return cls(
            func.namespace in EXCHANGES,
            is_product(func),
            func._schema.name in ("aten::_to_copy", "aten::copy_"),
            any(func is written for _, written in WRITTEN_IN_PLACE),
        )


@dataclass
class Most:
    """The highest moment of a phase. lines: bytes by (category, line)."""

    num_bytes: int = 0
    lines: dict[tuple[str, str], int] = field(default_factory=dict)
    at: str = ""
    """The operator and the line that made the last tensor before it."""
    total_bytes: int = 0
    """Device and host together at their highest moment, which may be another one, on CPU ranks with what gloo holds inside
    a collective: what a CPU rank has resident."""


@dataclass
class StepCount:
    """Of one rank. All bytes of phases and states are above what was alive before the model was built."""

    init: Most
    cold: dict[str, Most]
    """By phase, of the first step, in which Adam makes its states."""
    warm: dict[str, Most]
    states_bytes: int
    """On the device between steps."""
    resting_bytes: int
    """Device and host together between steps."""
    host: dict[str, int]
    """Bytes on the host by category, each at its most in the warm step; on CPU ranks kept activations only."""
    flops: dict[str, float]
    """By kind: gemm, attention_forward, attention_backward. Of the warm step, on this rank."""
    traffic: dict[str, int]
    """Bytes by kind of collective, of the warm step."""
    copied_bytes: int
    """Between device and host in the warm step, both ways."""
    operators: int
    tokens: int

    @property
    def peak(self) -> Most:
        return max(self.warm.values(), key=lambda most: most.num_bytes)


def count_steps(cfg: RunConfig, topology: Topology, fake: bool = False) -> StepCount:
    """From the model on. fake: no tensor has numbers, so pretrained weights are not read."""
    from stack.engine.build import build_engine
    from stack.engine.ds_config import build_ds_config
    from stack.engine.zero_init import join_deepspeed, zero3_partitioner
    from stack.models.build import DTYPES, fill_model, prepare_model
    from stack.parallel.apply import apply_parallelism

    join_deepspeed(topology)
    ds_config, dtype = build_ds_config(cfg, topology.world), DTYPES[cfg.engine.precision]
    with unset_fake_temporarily():  # what judges a model reads numbers
        blank = prepare_model(cfg.model, cfg.data.seq_len, dtype, cfg.seed, reads_weights=not fake)
        if topology.device.type == VIRTUAL:  # values are drawn and read on the host
            blank = replace(blank, init="pretrained", weights=None)
    with Counted(topology.device) as live:
        # A parameter cannot move to the virtual device, so it is born there.
        with topology.device if topology.device.type == VIRTUAL else nullcontext():
            partition = zero3_partitioner(ds_config, dtype) if cfg.engine.stage == 3 else None
            built = fill_model(blank, partition)
        apply_parallelism(
            built.model, built.spec, cfg.memory, cfg.model.attention, cfg.engine.stage, topology
        )
        engine = build_engine(built.model, cfg.optim, topology, ds_config)
        init = live.phases.pop("init")
        head = model_spec.head(built.model)
        head.register_forward_pre_hook(lambda *_: live.enter("loss"), prepend=True)
        head.register_forward_hook(lambda *_: live.enter("backward"))
        cold, warm = (_step(cfg, topology, engine, live) for _ in range(2))
        found = live.result(init, cold, warm, derive.rows_per_step(cfg, topology.world) * cfg.data.seq_len)
        engine.close()
    return found


def _step(cfg: RunConfig, topology: Topology, engine: Engine, live: Counted) -> dict[str, Most]:
    """One optimizer step, as `train/loop.py` takes it, on rows without meaning."""
    from stack.methods import build_method

    method, targets = build_method(cfg.method), cfg.data.micro_batch * cfg.data.seq_len * topology.dp
    live.restart("forward")
    batches = [_batch(cfg, topology) for _ in range(cfg.engine.accumulation)]
    for batch in batches:
        live.enter("forward")
        engine.forward_backward(method, batch, targets)
    del batch
    live.enter("optimizer")
    engine.step(cfg.optim.lr)
    del batches
    live.enter("between")
    return {phase: most for phase, most in live.phases.items() if phase != "between"}


def _batch(cfg: RunConfig, topology: Topology) -> MicroBatch:
    """This rank's slice of rows; documents of `data.random_document_tokens`, else one a row."""
    rows, seq = cfg.data.micro_batch, cfg.data.seq_len
    seq_local = -(-seq // topology.sp)
    with unset_fake_temporarily():  # attention reads them as numbers
        length = cfg.data.random_document_tokens or seq
        starts = [
            row * seq_local * topology.sp + start for row in range(rows) for start in range(0, seq, length)
        ]
        bounds = torch.tensor([*starts, rows * seq_local * topology.sp], dtype=torch.int32)
    ids = torch.zeros(rows, seq_local, dtype=torch.long)
    return MicroBatch(ids, torch.zeros_like(ids), torch.zeros_like(ids), bounds, (seq,) * rows)


class Counted(LiveBytes):
    """Live bytes by phase, category and line, FLOPs and collectives; on real tensors or on fake ones."""

    COUNTS_FAKE = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._on_device, self.host_at_start = device.type, 0
        self._func, self._last = None, ""
        self._traits: dict[int, _Traits] = {}  # operators live as long as torch; their own hash is slow
        self.sites = Sites()
        self._site_of: dict[int, Site] = {}
        self._lines: Counter[tuple[str, str]] = Counter()
        self._host_parts: Counter[str] = Counter()
        self._host_most: Counter[str] = Counter()
        self.restart("init")

    def __enter__(self) -> Any:
        super().__enter__()
        self.host_at_start = self.host
        # What was there before is nobody's.
        self.phases.clear()
        self._site_of.clear()
        self._lines.clear()
        self._host_parts.clear()
        gc.collect()
        gc.freeze()
        gc.disable()  # cycles end where a phase does, on every machine
        return self

    def __exit__(self, *error: Any) -> None:
        gc.enable()
        gc.unfreeze()
        super().__exit__(*error)

    def restart(self, phase: str) -> None:
        """Count a step from here on, which begins with `phase`."""
        self.phases: dict[str, Most] = {}
        self._phase, self.operators, self.copied = phase, 0, 0
        self.flops: defaultdict[str, float] = defaultdict(float)
        self.traffic = Counter[str]()
        self._host_most = Counter(self._host_parts)
        self.sites.restart()

    def enter(self, phase: str) -> None:
        gc.collect()
        self._phase = phase
        self._note()

    def result(self, init: Most, cold: dict[str, Most], warm: dict[str, Most], tokens: int) -> StepCount:
        """Of the step since the last `restart`. tokens: of a step of all ranks."""
        device, host = self.device - self.at_start, self.host - self.host_at_start
        return StepCount(
            init=init,
            cold=cold,
            warm=warm,
            states_bytes=device,
            resting_bytes=device + host,
            host={part: num_bytes for part, num_bytes in self._host_most.items() if num_bytes},
            flops=dict(self.flops),
            traffic=dict(self.traffic),
            copied_bytes=self.copied,
            operators=self.operators,
            tokens=tokens,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The numbers that DeepSpeed and the engine ask for: finite, not overflown, equal.
        if func is SCALAR and isinstance(args[0], FakeTensor):
            return 0 if args[0].dtype in (torch.bool, torch.uint8) else 1
        if func is EQUAL and isinstance(args[0], FakeTensor):
            return True
        traits = self._traits.get(id(func))
        if traits is None:
            traits = self._traits[id(func)] = _Traits.of(func)
        if traits.rewritten and (node := torch._C._current_autograd_node()) is not None:
            func = WRITTEN_IN_PLACE.get((node.name(), func), func)
        self.operators, self._func = self.operators + 1, func
        self.sites.remember()
        if traits.exchanges:
            return self._exchange(func, types, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if traits.product:
            self._add_flops(func, args, kwargs)
        elif traits.copies:
            self._copy(args, result)
        return result

    def _exchange(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        sent = collective(func, args)
        before = holders_of_all(args) if sent is not None else []
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if sent is None:
            return result
        self.traffic[sent[0]] += sent[1]
        self._note(gloo_bytes(func, args) if self._on_device == "cpu" else 0)
        results = [result]
        del result
        return until_let_go([results.pop()], before)

    def _add_flops(self, func: Any, args: Any, kwargs: Any) -> None:
        if (counted := count_flops(func, args, kwargs)) is not None:
            kind, flops = counted
            self.flops[kind] += flops
            if kind == "attention_backward" and "flash_attention" in func._schema.name:
                self._with_scratch(func, args)

    def _copy(self, args: Any, result: Any) -> None:
        source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
        if source.device.type != result.device.type:
            self.copied += result.numel() * result.element_size()

    def _with_scratch(self, func: Any, args: Any) -> None:
        """FlashAttention 2 (csrc/flash_attn/flash_api.cpp): dq in fp32, a number a query, and with fewer key/value heads
        dk and dv of all query heads. Its results are alive beside it."""
        if "for_cpu" in func._schema.name:
            return
        query, key = args[1], args[2]
        heads = 1 if "scaled_dot_product" in func._schema.name or query.dim() == 3 else 2
        scratch = 4 * query.numel() + 4 * query.numel() // query.shape[-1]
        if query.shape[heads] != key.shape[heads]:
            scratch += 2 * query.numel() * query.element_size()
        self._add(scratch, on_host=False)
        self._lines[SCRATCH.category, SCRATCH.line] += scratch
        self._note()
        self._add(-scratch, on_host=False)
        self._lines[SCRATCH.category, SCRATCH.line] -= scratch

    def _call(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Where tensors are fake, what torch would call after a second way through its dispatcher, a tenth of the time."""
        if (fake := torch._C._unset_dispatch_mode(FAKE)) is None:
            return func(*args, **kwargs)
        try:
            return cast(FakeTensorMode, fake).dispatch(func, types, args, kwargs)
        finally:
            torch._C._set_dispatch_mode(fake)

    def _count(self, tensors: Iterable[Tensor], host: bool | None) -> None:
        more = False
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._known.get(key)
            if (known is not None and known[1] == storage.nbytes()) or tensor.device.type == "meta":
                continue
            # A virtual device tells by itself what is on it; on CPU ranks the maker does.
            away = tensor.device.type != self._on_device if self._on_device == VIRTUAL else host
            super()._count([tensor], away)
            if known is None and key in self._known:
                self._attribute(key)
            more = True
        if more:
            self._note()

    def _attribute(self, key: int) -> None:
        _, num_bytes, on_host = self._known[key]
        site = self.sites.find() if num_bytes >= SMALL else Site(OTHER, f"tensors below {SMALL} bytes")
        if self._phase == "init" and site.category == GATHERED:
            site = replace(site, category=PARAMETERS)
        if site.category == GRADIENTS and self._func is EMPTY:
            site = replace(site, category=BUCKETS)
        self._site_of[key], self._last = site, site.line
        self._at(site, num_bytes, on_host)

    def _at(self, site: Site, num_bytes: int, on_host: bool) -> None:
        if on_host:
            self._host_parts[site.category] += num_bytes
            self._host_most[site.category] = max(
                self._host_most[site.category], self._host_parts[site.category]
            )
        else:
            self._lines[site.category, site.line] += num_bytes

    def _resized(self, key: int, by: int) -> None:
        if (site := self._site_of.get(key)) is not None:
            self._at(site, by, self._known[key][2])

    def _forget(self, key: int) -> None:
        site, (_, num_bytes, on_host) = self._site_of.pop(key, None), self._known[key]
        super()._forget(key)
        if site is not None:
            self._at(site, -num_bytes, on_host)

    def _note(self, inside: int = 0) -> None:
        """inside: bytes of the machine's memory that a call holds by itself."""
        most = self.phases.setdefault(self._phase, Most())
        above = self.device - self.at_start
        most.total_bytes = max(most.total_bytes, above + self.host - self.host_at_start + inside)
        if above > most.num_bytes:
            most.num_bytes = above
            most.lines = {place: num_bytes for place, num_bytes in self._lines.items() if num_bytes}
            most.at = f"{self._func} of {self._last}"
