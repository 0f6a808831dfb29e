"""Out of memory: which setting that is still off would help most, and by about how much.

The numbers are estimates from shapes alone, each by one short formula, so that levers can be compared; what a run needs in
all is another question. They hold for one rank, in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stack.config import derive
from stack.config.schema import RunConfig
from stack.errors import MemoryShortage
from stack.models.spec import ModelSpec

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
    marks = ("can't allocate memory", "CUDA out of memory", "std::bad_alloc", "Cannot allocate memory")
    return isinstance(error, RuntimeError | OSError) and any(mark in str(error) for mark in marks)


def explain(error: BaseException, cfg: RunConfig, spec: ModelSpec, world: int, device: str) -> MemoryShortage:
    """The error that a user sees in place of `error`."""
    kind = "device" if device == "cuda" and not _of_host(error) else "host"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    levers = device_levers(cfg, spec, world, device) if kind == "device" or device == "cpu" else []
    levers = levers or host_levers(cfg, spec, world)
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
    return [lever for lever in (*_activations(cfg, spec, world), *_states(cfg, spec, world, device)) if lever]


def _activations(cfg: RunConfig, spec: ModelSpec, world: int) -> Iterator[Lever]:
    memory, heads = cfg.memory, spec.num_heads
    tokens, size = cfg.data.micro_batch * derive.seq_local(cfg.data, cfg.parallel), _bytes(cfg)
    saved_whole = memory.checkpointing == "none" and not memory.lean
    # Of one layer and token, in elements: norms and residuals, q, k, v and attention's output, and the MLP's three.
    attention = (heads + 2 * spec.num_kv_heads) * spec.head_dim + heads * spec.head_dim
    layer = 6 * spec.hidden + attention + 3 * spec.intermediate * max(spec.experts_per_token, 1)
    hidden = tokens * spec.hidden * size
    kept = spec.num_layers * (tokens * layer * size if saved_whole else hidden)
    if saved_whole:
        yield Lever("memory=lean", kept - spec.num_layers * hidden)
    elif not memory.offload:
        yield Lever("memory.offload=true", kept)
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
    elif not saved_whole:
        yield Lever("memory.tiled_mlp=true", mlp * (1 - min(memory.mlp_tile, tokens) / tokens))
    rest = kept * (not memory.offload) + mlp * (not memory.tiled_mlp) + logits * (not memory.tiled_loss)
    if world % (2 * cfg.parallel.sp) == 0 and heads % (2 * cfg.parallel.sp) == 0:
        yield Lever(f"parallel.sp={2 * cfg.parallel.sp}", rest / 2)
    if cfg.data.micro_batch > 1:
        more = cfg.engine.accumulation * cfg.data.micro_batch
        share = 1 - 1 / cfg.data.micro_batch
        yield Lever(f"data.micro_batch=1 engine.accumulation={more}", rest * share)


def _states(cfg: RunConfig, spec: ModelSpec, world: int, device: str) -> Iterator[Lever]:
    """Weights, gradients and optimizer states: 12 bytes a parameter for the last (fp32 weights and two moments)."""
    engine, parameters, size = cfg.engine, spec.num_parameters, _bytes(cfg)
    optimizer, spread = 12 * parameters, 1 - 1 / world
    parts = {0: optimizer, 1: size * parameters, 2: size * parameters}
    if engine.stage < 3 and world > 1:
        yield Lever("engine=zero3", sum(parts[stage] for stage in range(engine.stage, 3)) * spread)
    if device == "cuda" and engine.stage >= 1 and engine.offload_optimizer == "none":
        yield Lever("engine.offload_optimizer=cpu", optimizer / world)


def host_levers(cfg: RunConfig, spec: ModelSpec, world: int) -> list[Lever]:
    """What would need less host memory beside a device: what was moved there."""
    found = []
    tokens, size = cfg.data.micro_batch * derive.seq_local(cfg.data, cfg.parallel), _bytes(cfg)
    if cfg.memory.offload:
        found.append(Lever("memory.offload=false", spec.num_layers * tokens * spec.hidden * size))
        if world % (2 * cfg.parallel.sp) == 0 and spec.num_heads % (2 * cfg.parallel.sp) == 0:
            change = f"parallel.sp={2 * cfg.parallel.sp}"
            found.append(Lever(change, spec.num_layers * tokens * spec.hidden * size / 2))
    if cfg.engine.offload_optimizer == "cpu":
        found.append(Lever("engine.offload_optimizer=none", 12 * spec.num_parameters / world))
    if cfg.engine.offload_param == "cpu":
        found.append(Lever("engine.offload_param=none", size * spec.num_parameters / world))
    return found


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"


def _bytes(cfg: RunConfig) -> int:
    return 4 if cfg.engine.precision == "fp32" else 2


def _of_host(error: BaseException) -> bool:
    return not isinstance(error, torch.OutOfMemoryError) and "CUDA" not in str(error)
