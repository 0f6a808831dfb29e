"""One process that stands for all ranks of a run on a device that is not there: where `exact.py` has its counts made.

It changes DeepSpeed and torch for as long as it lives, so it does nothing else.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from stack.bench.fake_kernels import Kernels, install_kernels
from stack.bench.step_count import StepCount, count_steps
from stack.bench.virtual_device import register_fake_ranks, register_virtual_device
from stack.config import derive
from stack.config.schema import RunConfig
from stack.dist.topology import Topology


def count_alone(
    cfg: RunConfig, world: int, kernels: Kernels | None = None, virtual: bool = True
) -> StepCount:
    """Two steps of rank 0 of `world`. kernels: None for those of `site.device`. virtual: on the virtual device; without, as
    CPU ranks would, where host and device are one memory."""
    kernels = kernels or ("cpu" if cfg.site.device == "cpu" else "gpu")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated")
    device = register_virtual_device() if virtual else torch.device("cpu")
    from stack.engine.alone import compare_no_ranks, compute_on

    compute_on(device)
    compare_no_ranks()
    install_kernels(kernels)
    setattr(torch.nn.Module, "to", _buffers_to)  # noqa: B010  as in stack/patches.py
    topology = _fake_ranks(cfg, world, device)
    # In one thread: what makes tensors with numbers fake is set for each thread.
    with torch.autograd.set_multithreading_enabled(False), FakeTensorMode(allow_non_fake_inputs=True):
        return count_steps(cfg, topology, fake=True)


def _buffers_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """In place of `Module.to`: parameters are born where they belong, and torch cannot exchange fake ones."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(*args, **kwargs)
    return module


def countable(cfg: RunConfig, num_layers: int) -> RunConfig:
    """The settings with which a step of so many layers is counted: no kernel has to be installed here, nothing is read or
    written, and what would lie on a disk lies on the host."""
    fields = dict(derive.architecture(cfg.model))
    total = fields.get("num_hidden_layers")
    fields |= {
        name: value[:num_layers]
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == total
    }
    fields["num_hidden_layers"] = num_layers
    model = replace(cfg.model, attention="sdpa", path=None, init="scratch", architecture=fields)
    memory = replace(cfg.memory, spill_folder=None, host_gib=None, pin_memory=False)
    if memory.fused_kernels != "none":
        # As stack/parallel/fused.py chooses.
        left_alone = memory.fused_kernels == "auto" and cfg.site.device == "cpu"
        memory = replace(memory, fused_kernels="none" if left_alone else "torch")
    engine = replace(cfg.engine, cpu_optimizer="torch", nvme_path=None)
    if engine.offload_optimizer == "nvme":
        engine = replace(engine, offload_optimizer="cpu")
    return replace(cfg, model=model, memory=memory, engine=engine)


def _fake_ranks(cfg: RunConfig, world: int, device: torch.device) -> Topology:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group(register_fake_ranks(), rank=0, world_size=world, store=FakeStore())
    sp = cfg.parallel.sp
    everybody: Any = dist.group.WORLD
    group: Any = everybody if sp == world else dist.new_group(list(range(sp)))
    return Topology(
        rank=0,
        world=world,
        sp=sp,
        dp=world // sp,
        sp_rank=0,
        dp_rank=0,
        device=device,
        sp_group=group if sp > 1 else None,
        host_group=everybody,
    )
