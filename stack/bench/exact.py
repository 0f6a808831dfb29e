"""The exact forecast: the run's own step, counted without the machine that it is for.

    count(cfg, ranks)                  every number of a Forecast that needs no clock
    count(cfg, ranks, layers="all")    no layer left out

Model, parallelism, DeepSpeed's engine and optimizer are those of a run (`step_count.py`). Their tensors are fake, one
process group answers for all ranks, and the device is `virtual_device.py`'s, so what stays on the host is told from what
is on the GPU. Unless all layers are counted, three counts of a few layers each are taken, side by side in processes of their
own, and the third says whether bytes grow evenly from layer to layer; where they do not, all layers are counted after all.

What a GPU needs beyond it: what a kernel takes inside one call, of which only FlashAttention's backward is added; CUDA's
context, cuBLAS and NCCL; what the allocator holds in reserve; and tensors that another stream still reads.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

from stack.bench.one_process import count_alone, countable
from stack.bench.step_count import Most, StepCount
from stack.config import derive
from stack.config.kept import HostBytes, host_bytes
from stack.config.schema import RunConfig
from stack.errors import ConfigError, Fault, LaunchError, StackError
from stack.models.registry import family_of
from stack.plan.forecast import (
    GIB,
    GRADIENTS,
    KEPT,
    OPTIMIZER,
    Flops,
    Forecast,
    Host,
    Memory,
    Peak,
)

LINES = 25
"""Source lines named of a peak."""

EVEN = 0.002
"""Share of a peak by which the third count may miss the line through the first two."""

IMPORTS = [
    *("stack.bench.one_process", "stack.engine.alone", "stack.engine.build", "stack.engine.zero_init"),
    *("stack.methods", "stack.models.build", "stack.parallel.apply"),
]
"""What a count imports, before it makes its own changes to torch and DeepSpeed."""

FEW = 2
"""Layers of the smallest count, where nothing asks for more."""


@dataclass
class ExactForecast(Forecast):
    """A forecast by count."""

    cold: dict[str, int] = field(default_factory=dict)
    """Most bytes of each phase of the first step, in which Adam makes its states."""
    lines: list[tuple[str, str, int]] = field(default_factory=list)
    """(category, source line, bytes) at the highest peak, the most first."""


def count(
    cfg: RunConfig, ranks: int, layers: int | str = "auto", tell: Callable[[str], None] = print
) -> ExactForecast:
    """A forecast by count. ranks: of the whole run. layers: `auto`, `all`, or how many the smallest of three counts has.

    Raises ConfigError for a model whose layers are not known, LaunchError where a count is ended from outside.
    """
    total = num_layers(cfg)
    _begin_imports()
    depths = _depths(cfg, total, layers)
    tell(f"counting two steps with {_listed(depths)} of {total} layers; about a minute, more for many tiles")
    counts = _count_each(cfg, ranks, depths)
    if len(depths) == 1:
        return _told(as_forecast(cfg, ranks, counts[0], [f"counted with all {total} layers"]), tell)
    first, second, third = counts
    expected = _along(first, second, (depths[2] - depths[0]) / (depths[1] - depths[0]))
    off = max(abs(most.num_bytes / third.warm[phase].num_bytes - 1) for phase, most in expected.warm.items())
    if off > EVEN:
        tell(f"bytes do not grow evenly with the layers ({off:.1%} off): counting all {total}")
        return count(cfg, ranks, "all", tell)
    found = _along(second, third, (total - depths[1]) / (depths[2] - depths[1]))
    note = f"counted with {_listed(depths)} of {total} layers, which lie on a line within {off:.2%}"
    return _told(as_forecast(cfg, ranks, found, [note]), tell)


def _told(found: ExactForecast, tell: Callable[[str], None]) -> ExactForecast:
    tell(describe(found))
    return found


def num_layers(cfg: RunConfig) -> int:
    """Decoder layers. Raises ConfigError where the settings do not say."""
    layers = derive.architecture(cfg.model).get("num_hidden_layers")
    if not isinstance(layers, int):
        fix = (
            "model.architecture with the fields of the model's config.json, or model.path=FOLDER that has it"
        )
        raise ConfigError([Fault("model", cfg.model.name, "a model whose layers are known", fix)])
    return layers


def _depths(cfg: RunConfig, total: int, layers: int | str) -> list[int]:
    """Layers of each count. The third is far from the others, since what is highest may change on the way."""
    if layers == "all" or _uneven(derive.architecture(cfg.model)):
        return [total]
    few = _smallest(cfg) if layers == "auto" else int(layers)
    depths = [few, few + 1, 2 * few]
    if few == FEW:
        depths[2] = FEW + 2
    return depths if sum(depths) < total else [total]


def _uneven(fields: dict[str, Any]) -> bool:
    """Whether layers differ from each other."""
    kinds = set(fields.get("layer_types") or ())
    partly = bool(fields.get("use_sliding_window")) and fields.get("model_type") != "mistral"
    sparse = bool(fields.get("mlp_only_layers")) or (fields.get("decoder_sparse_step") or 1) > 1
    return len(kinds) > 1 or partly or sparse


def _smallest(cfg: RunConfig) -> int:
    """Layers from which on one more is like every other. DeepSpeed keeps gathered what is used again within
    `stage3_max_reuse_distance`, and fetches ahead up to `stage3_max_live_parameters`, so a model of fewer parameters keeps
    what a larger one lets go. Lean blocks fetch once each: no further ahead than the next, unless layers are so small that
    each fetch, of `stage3_prefetch_bucket_size`, takes more than one."""
    if cfg.engine.stage < 3:
        return FEW
    from stack.engine.ds_config import build_ds_config
    from stack.models.build import DTYPES, prepare_model

    zero = build_ds_config(cfg, cfg.parallel.sp)["zero_optimization"]
    two, three = (
        prepare_model(
            countable(cfg, depth).model, cfg.data.seq_len, DTYPES[cfg.engine.precision], cfg.seed, False
        ).built.spec.num_parameters
        for depth in (2, 3)
    )
    layer = three - two
    step_by_step = _is_lean(cfg) and zero.get("stage3_prefetch_bucket_size", 5e7) <= layer
    ahead = 0 if step_by_step else zero.get("stage3_max_live_parameters", 1e9)
    return max(FEW, math.ceil(max(zero.get("stage3_max_reuse_distance", 1e9), ahead) / layer) + 1)


def _begin_imports() -> None:
    """A process imports once what all counts need, while this one finds out which counts are needed, and is then their
    parent."""
    with _one_core_each():
        multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
        forkserver.ensure_running()


def _count_each(cfg: RunConfig, ranks: int, depths: list[int]) -> list[StepCount]:
    """One process a count, side by side as far as there are cores; each takes about 1 GiB."""
    context = multiprocessing.get_context("forkserver")
    at_once = min(len(depths), len(os.sched_getaffinity(0)))
    with _one_core_each(), ProcessPoolExecutor(at_once, mp_context=context, max_tasks_per_child=1) as pool:
        largest_first = sorted(depths, reverse=True)
        futures = {depth: pool.submit(_count_one, countable(cfg, depth), ranks) for depth in largest_first}
        try:
            return [futures[depth].result() for depth in depths]
        except BrokenProcessPool as error:
            raise LaunchError(
                "a process that counted a step was ended from outside, as for want of host memory (each takes about "
                "1 GiB). Fix: fewer at once, as with taskset -c 0"
            ) from error


def _count_one(cfg: RunConfig, ranks: int) -> StepCount:
    try:
        return count_alone(cfg, ranks)
    except StackError:
        raise
    except Exception as error:  # torch's own cannot all be carried over to the process that waits
        raise LaunchError(
            f"this run's step cannot be counted: {traceback.format_exc().rstrip()}\nFix: the closed form, without "
            "exact=true; and report this"
        ) from error


@contextmanager
def _one_core_each() -> Iterator[None]:
    """Processes started inside see no GPU and use one core."""
    asked = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _along(first: StepCount, second: StepCount, times: float) -> StepCount:
    """`times` as far from the first count as the second is, on the line through both."""

    def line(one: Any, other: Any) -> Any:
        if isinstance(one, dict):
            return {key: line(one.get(key, 0), other.get(key, 0)) for key in one | other}
        if isinstance(one, Most):
            return Most(**{name: line(value, getattr(other, name)) for name, value in vars(one).items()})
        if isinstance(one, str):
            return other
        value = one + (other - one) * times
        return round(value) if isinstance(one, int) else value

    return StepCount(**{name: line(value, getattr(second, name)) for name, value in vars(first).items()})


def as_forecast(cfg: RunConfig, ranks: int, found: StepCount, notes: list[str]) -> ExactForecast:
    """A count in the words of the schema."""
    attention = found.flops.get("attention_forward", 0.0) + found.flops.get("attention_backward", 0.0)
    kept, spilled = round(found.host.get(KEPT, 0) * _page_lock_rounding(cfg)), 0
    if cfg.memory.spill_folder is not None:  # counted as if all stayed in memory
        bounded = _by_formula(cfg)
        kept, spilled = min(kept, bounded.in_memory), bounded.in_file
    states = {name: num for name, num in found.host.items() if name != KEPT}
    optimizer = sum(states.get(name, 0) for name in (OPTIMIZER, GRADIENTS))
    phases = {"init": found.init} | found.warm
    lines = sorted(((*place, num) for place, num in found.peak.lines.items()), key=lambda line: -line[2])
    return ExactForecast(
        tier="exact count",
        run={"model": cfg.model.name, "seq_len": cfg.data.seq_len, "ranks": ranks, "sp": cfg.parallel.sp},
        memory=Memory({name: _peak(most) for name, most in phases.items()}, found.states_bytes),
        host=Host(
            kept_bytes=kept,
            spilled_bytes=spilled,
            optimizer_bytes=optimizer,
            parameter_bytes=sum(states.values()) - optimizer,
        ),
        flops=Flops(hardware=sum(found.flops.values()) * ranks, attention=attention * ranks),
        tokens_a_step=found.tokens,
        communication=dict(found.traffic),
        host_traffic_bytes=found.copied_bytes,
        not_modelled=list(_not_modelled(cfg)),
        assumptions=[*notes, "documents as long as data.random_document_tokens, else a row"],
        cold={name: most.num_bytes for name, most in found.cold.items()},
        lines=lines[:LINES],
    )


def _peak(most: Most) -> Peak:
    parts: Counter[str] = Counter()
    for (category, _), num_bytes in most.lines.items():
        parts[category] += num_bytes
    return Peak(most.num_bytes, dict(parts), operation=most.at)


def _page_lock_rounding(cfg: RunConfig) -> float:
    """By how much torch rounds up what is counted, where it is page-locked."""
    everything = replace(cfg, memory=replace(cfg.memory, spill_folder=None, host_gib=None))
    counted = _by_formula(everything, page_locked=False).in_memory
    return _by_formula(everything).in_memory / counted if counted else 1.0


def _by_formula(cfg: RunConfig, page_locked: bool = True) -> HostBytes:
    fields = derive.architecture(cfg.model)
    heads, hidden = fields.get("num_attention_heads") or 1, fields.get("hidden_size") or 1
    dim = fields.get("head_dim") or hidden // heads
    sizes: Any = SimpleNamespace(num_layers=num_layers(cfg), hidden=hidden, num_heads=heads, head_dim=dim)
    return host_bytes(cfg, sizes, _is_lean(cfg), on_gpu=page_locked and cfg.site.device != "cpu")


def _is_lean(cfg: RunConfig) -> bool:
    """Whether its blocks are lean layers."""
    family = family_of(str(derive.architecture(cfg.model).get("model_type")))
    return cfg.memory.lean and family.lean is not None


def _not_modelled(cfg: RunConfig) -> Iterator[str]:
    yield "inside kernels: workspace of GEMMs and of attention other than FlashAttention's backward"
    yield "memory that another stream still reads when it is let go"
    if cfg.model.attention != "sdpa":
        yield f"model.attention={cfg.model.attention}: counted as torch's FlashAttention 2"
    if cfg.memory.fused_kernels in ("liger", "compiled"):
        yield f"memory.fused_kernels={cfg.memory.fused_kernels}: counted with the fused norm alone"
    if cfg.engine.offload_optimizer == "nvme":
        yield "NVMe: what lies on it is counted as host memory, its buffers are not"
    if cfg.engine.offload_optimizer != "none" and cfg.engine.cpu_optimizer == "deepspeed":
        yield "DeepSpeed's CPUAdam: counted as torch's AdamW on the host"


def describe(found: ExactForecast) -> str:
    """Peaks by phase, then the source lines of the highest."""
    memory = found.memory
    lines = [f"{'phase':<12}{'cold step GiB':>14}{'warm step GiB':>15}"]
    for name, peak in memory.phases.items():
        cold = f"{found.cold[name] / GIB:.3f}" if name in found.cold else ""
        lines.append(f"{name:<12}{cold:>14}{peak.num_bytes / GIB:>15.3f}")
    lines.append(
        f"between steps {memory.states_bytes / GIB:.3f} GiB; host {found.host.rank_bytes / GIB:.3f} GiB a rank"
    )
    lines.append(f"at the highest, in the {memory.where}, while {memory.peak.operation}:")
    lines += [f"{num / GIB:>9.3f}  {category:<17} {line}" for category, line, num in found.lines]
    return "\n".join(lines)


def _listed(depths: list[int]) -> str:
    return ", ".join(map(str, depths[:-1])) + f" and {depths[-1]}" if len(depths) > 1 else str(depths[0])
