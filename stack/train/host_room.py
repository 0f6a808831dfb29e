"""Whether the host has room for what the layers keep for backward, asked before the model is filled: a host that runs out
kills ranks in the middle of a step, without a word."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

from stack.config.schema import RunConfig
from stack.dist.env import RankEnv
from stack.dist.host_memory import HostMemory, host_memory
from stack.errors import MemoryShortage
from stack.models.registry import family_of
from stack.models.spec import ModelSpec

GIB = 1 << 30


def kept_bytes(cfg: RunConfig, spec: ModelSpec, on_gpu: bool) -> int:
    """Bytes that one rank keeps in host memory at the end of a forward; 0 without offload."""
    memory = cfg.memory
    if not memory.offload:
        return 0
    tokens = cfg.data.micro_batch * math.ceil(cfg.data.seq_len / cfg.parallel.sp)
    width = 4 if cfg.engine.precision == "fp32" else 2
    hidden = tokens * spec.hidden * width
    if memory.lean and family_of(spec.family).lean is not None:
        attention = tokens * spec.num_heads * (spec.head_dim * width + 4)
        return spec.num_layers * (hidden + attention)
    if on_gpu and memory.pin_memory:
        hidden = 1 << (hidden - 1).bit_length()  # torch rounds page-locked memory up to a power of two
    return spec.num_layers * hidden


def check_host_room(
    cfg: RunConfig, spec: ModelSpec, env: RankEnv, on_gpu: bool, tell: Callable[[str], None]
) -> None:
    """One rank of each node asks for all of them. Raises MemoryShortage for what can never fit on host or disk; tells of
    what does not fit at present, since other processes may yet end."""
    if env.local_rank != 0:
        return
    need, bound = kept_bytes(cfg, spec, on_gpu), cfg.memory.host_gib
    in_memory = need if bound is None else min(need, round(bound * GIB))
    if cfg.memory.spill_folder is not None:
        _check_disk(Path(cfg.memory.spill_folder).expanduser(), (need - in_memory) * env.local_world)
    there = host_memory()
    if there is None or in_memory * env.local_world <= there.free:
        return
    text = _shortage(in_memory, env.local_world, there, cfg.memory.spill_folder is not None)
    if in_memory * env.local_world > there.total:
        raise MemoryShortage(text)
    if env.rank == 0:
        tell(f"warning: {text}")


def _shortage(need: int, ranks: int, there: HostMemory, spills: bool) -> str:
    # A tenth is left to everything else on the node.
    share = there.free * 0.9 / ranks / GIB
    fix = (
        "a smaller memory.host_gib"
        if spills
        else "memory.spill_folder=FOLDER (on a local disk) with memory.host_gib"
    )
    return (
        f"the layers keep {need / GIB:.1f} GiB a rank in host memory, {need * ranks / GIB:.1f} GiB for the {ranks} ranks of "
        f"this node, where {there.free / GIB:.1f} of {there.total / GIB:.1f} GiB are free. Fix: {fix}, here about "
        f"memory.host_gib={share:.0f}; or more ranks a row, on more nodes"
    )


def _check_disk(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise MemoryShortage(
            f"memory.spill_folder={folder}: the ranks of this node will write {need / GIB:.1f} GiB ({need} bytes) there and "
            f"{free / GIB:.1f} GiB ({free} bytes) are free. Fix: a folder with more room, or a larger memory.host_gib"
        )
