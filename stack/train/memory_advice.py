"""Out of memory: which setting that is still off would help most, and by about how much.

The numbers are estimates from shapes alone, each by one short formula, so that levers can be compared; what a run needs in
all is another question. They hold for one rank, in one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from stack.config import derive
from stack.config.kept import layer_tensors
from stack.config.schema import RunConfig
from stack.errors import MemoryShortage
from stack.models.registry import family_of
from stack.models.spec import ModelSpec
from stack.train.host_room import kept_bytes

GIB = 1024**3
SHOWN = 4  # levers named, at most
LEAST_SHARE = 1e-2  # share of the best lever below which another is not worth a word


@dataclass(frozen=True)
class Lever:
    """A change of settings and the bytes that one rank would need less."""

    change: str
    saves_bytes: float


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    marks = (
        *("can't allocate memory", "Cannot allocate memory", "std::bad_alloc"),
        *("CUDA out of memory", "CUDA error: out of memory"),  # of torch's allocator, and of CUDA's own calls
    )
    return isinstance(error, RuntimeError | OSError) and any(mark in str(error) for mark in marks)


def explain(error: BaseException, cfg: RunConfig, spec: ModelSpec, world: int, device: str) -> MemoryShortage:
    """The error that a user sees in place of `error`."""
    kind = "device" if device == "cuda" and not _of_host(error) else "host"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where_it_computes = kind == "device" or device == "cpu"
    levers = device_levers(cfg, spec, world, device) if where_it_computes else host_levers(cfg, spec, world)
    return MemoryShortage(f"out of {kind} memory: {reason}\n{advise(levers)}")


def advise_host(cfg: RunConfig, spec: ModelSpec, world: int, device: str) -> str:
    """Advice for a process that the kernel killed for want of host memory."""
    levers = device_levers(cfg, spec, world, device) if device == "cpu" else host_levers(cfg, spec, world)
    return advise(levers)


def advise(levers: list[Lever]) -> str:
    """The levers as text, the strongest first."""
    levers = sorted(levers, key=lambda lever: -lever.saves_bytes)
    if not levers:
        return "Fix: more memory, more ranks or a shorter data.seq_len: no setting that is left would help"
    shown = [lever for lever in levers if lever.saves_bytes > LEAST_SHARE * levers[0].saves_bytes][:SHOWN]
    best, *others = [f"{lever.change} (about {_size(lever.saves_bytes)} a rank)" for lever in shown]
    text = f"Fix: {best}" + (f"; or {', '.join(others)}" if others else "")
    return f"{text}. These are estimates from the shapes"


def device_levers(cfg: RunConfig, spec: ModelSpec, world: int, device: str) -> list[Lever]:
    """What would need less memory where the model computes."""
    kept, on_gpu = _kept(cfg, spec), device != "cpu"
    levers = [*_keeping(cfg, spec, kept, on_gpu)]
    levers += _activations(cfg, spec, world, kept * (not (cfg.memory.offload and on_gpu)))
    return [lever for lever in (*levers, *_states(cfg, spec, world, device)) if lever.saves_bytes > 0]


def _saves_whole(cfg: RunConfig, spec: ModelSpec) -> bool:
    """Whether autograd keeps what every operator of a layer needs."""
    return cfg.memory.checkpointing == "none" and not (cfg.memory.lean and _can_be_lean(spec))


def _can_be_lean(spec: ModelSpec) -> bool:
    return family_of(spec.family).lean is not None


def _kept(cfg: RunConfig, spec: ModelSpec) -> float:
    """Bytes of all that layers keep for backward."""
    if not _saves_whole(cfg, spec):
        return spec.num_layers * sum(layer_tensors(cfg, spec, cfg.memory.lean and _can_be_lean(spec)))
    # Of one layer and token, in elements: norms and residuals, q, k, v and attention's output, and the MLP's three.
    attention = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + spec.num_heads * spec.head_dim
    layer = 6 * spec.hidden + attention + 3 * spec.intermediate * max(spec.experts_per_token, 1)
    tokens = cfg.data.micro_batch * derive.seq_local(cfg.data, cfg.parallel)
    return spec.num_layers * tokens * layer * _bytes(cfg)


def _with(cfg: RunConfig, **memory: Any) -> RunConfig:
    """With these settings of the memory section, and nothing spilled."""
    return replace(cfg, memory=replace(cfg.memory, spill_folder=None, host_gib=None, **memory))


def _keeping(cfg: RunConfig, spec: ModelSpec, kept: float, on_gpu: bool) -> Iterator[Lever]:
    """To keep less of layers, or to keep it elsewhere. On CPU ranks host memory is the device's, so only a disk is elsewhere."""
    if _saves_whole(cfg, spec):
        left = 0 if on_gpu else _kept(_with(cfg, lean=True, checkpointing="full"), spec)
        yield Lever("memory=lean", kept - left)
    elif not on_gpu:
        yield from _spilling(cfg, spec, kept_bytes(cfg, spec, on_gpu).in_memory or kept, on_gpu)
    elif not cfg.memory.offload:
        yield Lever("memory.offload=true", kept)


def _spilling(cfg: RunConfig, spec: ModelSpec, taken: float, on_gpu: bool) -> Iterator[Lever]:
    """Lean layers' oldest to a local disk. taken: bytes of memory that kept activations take now, of which half stay, and at
    least three layers: one that is computed, one on its way out and one on its way back."""
    memory = cfg.memory
    if not _can_be_lean(spec):
        return
    layer = kept_bytes(_with(cfg, lean=True, offload=True), spec, on_gpu).layer
    bound = max(3 * layer, taken / 2) / GIB
    bound = math.ceil(bound) if bound >= 10 else math.ceil(bound * 100) / 100
    needs = (
        "" if memory.lean and memory.offload else "memory.offload=true " if memory.lean else "memory=lean "
    )
    needs += "memory.spill_folder=FOLDER " if memory.spill_folder is None else ""
    yield Lever(f"{needs}memory.host_gib={bound:g}", taken - bound * GIB)


def _activations(cfg: RunConfig, spec: ModelSpec, world: int, kept: float) -> Iterator[Lever]:
    """kept: bytes on the device."""
    memory, heads = cfg.memory, spec.num_heads
    tokens, size = cfg.data.micro_batch * derive.seq_local(cfg.data, cfg.parallel), _bytes(cfg)
    # Logits, their gradient and the softmax between them, in fp32; a tile of them, where there are tiles.
    logits = 3 * 4 * spec.vocab * (min(memory.loss_tile, tokens) if memory.tiled_loss else tokens)
    if not memory.tiled_loss:
        yield Lever("memory.tiled_loss=true", logits * (1 - min(memory.loss_tile, tokens) / tokens))
    elif memory.loss_tile > 256:
        yield Lever(f"memory.loss_tile={max(256, memory.loss_tile // 4)}", logits * 0.75)
    # Gate, up, product and their gradients.
    mlp = 6 * size * spec.intermediate * (min(memory.mlp_tile, tokens) if memory.tiled_mlp else tokens)
    if memory.lean or memory.tiled_mlp:
        if memory.mlp_tile > 1024:
            yield Lever(f"memory.mlp_tile={max(1024, memory.mlp_tile // 4)}", mlp * 0.75)
    elif not _saves_whole(cfg, spec):
        yield Lever("memory.tiled_mlp=true", mlp * (1 - min(memory.mlp_tile, tokens) / tokens))
    rest = kept + mlp * (not memory.tiled_mlp) + logits * (not memory.tiled_loss)
    if world % (2 * cfg.parallel.sp) == 0 and heads % (2 * cfg.parallel.sp) == 0:
        yield Lever(f"parallel.sp={2 * cfg.parallel.sp}", rest / 2)
    if cfg.data.micro_batch > 1:
        more = cfg.engine.accumulation * cfg.data.micro_batch
        share = 1 - 1 / cfg.data.micro_batch
        yield Lever(f"data.micro_batch=1 engine.accumulation={more}", rest * share)


def _states(cfg: RunConfig, spec: ModelSpec, world: int, device: str) -> Iterator[Lever]:
    """Weights, gradients and optimizer states: 12 bytes a parameter for the last (fp32 weights and two moments), and 4 for
    the fp32 gradients that go with them."""
    engine, parameters, size = cfg.engine, spec.num_parameters, _bytes(cfg)
    optimizer, spread = 12 * parameters, 1 - 1 / world
    parts = {0: optimizer, 1: size * parameters, 2: size * parameters}
    if engine.stage < 3 and world > 1:
        yield Lever("engine=zero3", sum(parts[stage] for stage in range(engine.stage, 3)) * spread)
    if device == "cuda" and engine.stage >= 1 and engine.offload_optimizer == "none":
        yield Lever("engine.offload_optimizer=cpu", (optimizer + 4 * parameters) / world)


def host_levers(cfg: RunConfig, spec: ModelSpec, world: int) -> list[Lever]:
    """What would need less host memory beside a device: what was moved there."""
    engine, shard = cfg.engine, spec.num_parameters / world
    found = list(_kept_there(cfg, spec, world))
    if engine.offload_optimizer == "cpu":
        # fp32 weights, two moments and two copies of the gradients.
        found.append(Lever("engine.offload_optimizer=none", 20 * shard))
    if engine.offload_param == "cpu":
        found.append(Lever("engine.offload_param=none", _bytes(cfg) * shard))
    return [lever for lever in found if lever.saves_bytes > 0]


def _kept_there(cfg: RunConfig, spec: ModelSpec, world: int) -> Iterator[Lever]:
    """Of kept activations on the host."""
    data, taken = cfg.data, kept_bytes(cfg, spec, on_gpu=True).in_memory
    if not taken:
        return

    def saved(other: RunConfig) -> int:
        return taken - kept_bytes(other, spec, on_gpu=True).in_memory

    yield Lever("memory.offload=false", taken)
    yield from _spilling(cfg, spec, taken, on_gpu=True)
    if cfg.memory.lean and cfg.memory.spill_folder is None:
        yield Lever("memory=alst", saved(_with(cfg, lean=False, checkpointing="full")))
    sp = 2 * cfg.parallel.sp
    if world % sp == 0 and spec.num_heads % sp == 0:
        yield Lever(f"parallel.sp={sp}", saved(replace(cfg, parallel=replace(cfg.parallel, sp=sp))))
    if data.micro_batch > 1:
        more = cfg.engine.accumulation * data.micro_batch
        change = f"data.micro_batch=1 engine.accumulation={more}"
        yield Lever(change, saved(replace(cfg, data=replace(data, micro_batch=1))))


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"


def _bytes(cfg: RunConfig) -> int:
    return 4 if cfg.engine.precision == "fp32" else 2


def _of_host(error: BaseException) -> bool:
    return not isinstance(error, torch.OutOfMemoryError) and "CUDA" not in str(error)
