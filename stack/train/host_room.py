"""Whether the host has room for what the layers keep for backward and for the copy that checkpoints are written from, and
its disks for what goes there, asked before the model is filled: a host that runs out kills ranks in the middle of a step,
without a word."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import nn

from stack.config import derive
from stack.config.kept import HostBytes, host_bytes
from stack.config.schema import RunConfig
from stack.dist.env import RankEnv
from stack.dist.host_memory import HostMemory, host_memory
from stack.errors import MemoryShortage
from stack.models.registry import family_of
from stack.models.spec import ModelSpec

GIB = 1 << 30


def kept_bytes(cfg: RunConfig, spec: ModelSpec, on_gpu: bool) -> HostBytes:
    """What one rank keeps on the host at the end of a forward; nothing without offload."""
    lean = cfg.memory.lean and family_of(spec.family).lean is not None
    return host_bytes(cfg, spec, lean, on_gpu)


def check_host_room(
    cfg: RunConfig,
    spec: ModelSpec,
    env: RankEnv,
    on_gpu: bool,
    copy_bytes: int,
    tell: Callable[[str], None],
) -> None:
    """One rank of each node asks for all of them. Raises MemoryShortage for what can never fit on host or disk; tells of
    what does not fit at present, since other processes may yet end.

    copy_bytes: of one rank, what the forecast says that checkpoints are written from behind the steps.
    """
    if env.local_rank != 0:
        return
    kept = kept_bytes(cfg, spec, on_gpu)
    folder, bound = cfg.memory.spill_folder, cfg.memory.host_gib
    if folder is not None and bound is not None:
        if kept.layer > bound * GIB:
            raise MemoryShortage(_below_a_layer(bound, kept.layer))
        fix = "a folder with more room, or a larger memory.host_gib"
        what, spilled = "the ranks of this node will write", kept.in_file * env.local_world
        _check_disk("memory.spill_folder", Path(folder).expanduser(), what, spilled, fix)
    there, need = host_memory(), kept.in_memory + copy_bytes
    if there is None or need * env.local_world <= there.free:
        return
    # a tenth is left to everything else on the node
    fix = _fix(cfg, spec, there.free * 0.9 / env.local_world, kept.in_memory, copy_bytes)
    text = _shortage(kept.in_memory, copy_bytes, env.local_world, there, fix)
    # The copy is a forecast, which plan.gate may overrule; what layers keep is known.
    sure = need if cfg.plan.gate == "refuse" else kept.in_memory
    if sure * env.local_world > there.total:
        raise MemoryShortage(text)
    if env.rank == 0:
        tell(f"warning: {text}")


def _shortage(kept: int, copy: int, ranks: int, there: HostMemory, fix: str) -> str:
    layers = f"the layers keep {kept / GIB:.1f} GiB a rank in host memory"
    behind = f"checkpoints are written from a copy of {copy / GIB:.1f} GiB a rank in host memory"
    parts = [text for text, size in ((layers, kept), (behind, copy)) if size]
    return (
        f"{' and '.join(parts)}, {(kept + copy) * ranks / GIB:.1f} GiB for the {ranks} ranks of this node, where "
        f"{there.free / GIB:.1f} of {there.total / GIB:.1f} GiB are free. Fix: {fix}"
    )


def _fix(cfg: RunConfig, spec: ModelSpec, share: float, kept: int, copy: int) -> str:
    """share: bytes of host memory that a rank can have."""
    if not copy:
        return _fix_kept(cfg, spec, share)
    without = "checkpoint.asynchronous=false, which needs no copy"
    if kept <= share:
        return f"{without}; or more ranks, on more nodes"
    return f"{without}, and {_fix_kept(cfg, spec, share)}"


def _fix_kept(cfg: RunConfig, spec: ModelSpec, share: float) -> str:
    """For the layers alone."""
    more = "more ranks a row, on more nodes"
    if family_of(spec.family).lean is None:  # only lean layers spill
        return f"{more}, or a shorter data.seq_len"
    if cfg.memory.spill_folder is not None:
        lever = "a smaller memory.host_gib"
    else:
        lean = "" if cfg.memory.lean else "memory=lean "
        lever = f"{lean}memory.spill_folder=FOLDER (on a local disk) with memory.host_gib"
    return f"{lever}, here about memory.host_gib={share / GIB:.0f}; or {more}"


def _below_a_layer(bound: float, layer: int) -> str:
    # Three: one that is computed, one on its way to the file and one on its way back.
    return (
        f"memory.host_gib={bound:g}: a layer keeps {layer / GIB:.3g} GiB a rank. Fix: "
        f"memory.host_gib={math.ceil(3 * layer / GIB)} or more"
    )


def make_nvme_room(cfg: RunConfig, model: nn.Module, env: RankEnv) -> None:
    """One rank of each node asks for all of them, as above, and removes what an earlier start of this run left behind when
    it was killed. model: whole, of any device."""
    folder = derive.nvme_folder(cfg)
    if cfg.engine.offload_optimizer != "nvme" or folder is None or env.local_rank != 0:
        return
    # fp32: weights, gradients and AdamW's two moments, each in a file of its own.
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    need = (16 if cfg.optim.name == "adamw" else 8) * trained * env.local_world // env.world
    shutil.rmtree(folder, ignore_errors=True)
    disk, what = Path(folder).parent, f"the optimizer of this node's {env.local_world} ranks takes"
    fix = f"a folder with more room ({disk}/run-* are of runs that go on or were killed), or more nodes"
    _check_disk("engine.nvme_path", disk, what, need, fix)


def _check_disk(setting: str, folder: Path, what: str, need: int, fix: str) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise MemoryShortage(
            f"{setting}={folder}: {what} {need / GIB:.1f} GiB ({need} bytes) there and {free / GIB:.1f} GiB ({free} bytes) "
            f"are free. Fix: {fix}"
        )
