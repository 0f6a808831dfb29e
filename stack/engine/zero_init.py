"""Turning freshly made parameters into ZeRO-3 shards, module by module, while a model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn

from stack.dist.topology import Topology
from stack.patches import apply_patches


def join_deepspeed(topology: Topology) -> None:
    """Let DeepSpeed take over the process groups that `init_topology` made. Needed before `zero3_partitioner`."""
    apply_patches()
    backend = "gloo" if topology.device.type == "cpu" else "nccl"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def zero3_partitioner(ds_config: dict[str, Any], dtype: torch.dtype) -> Callable[[nn.Module], None]:
    """A function that shards the direct parameters of a module over all ranks and frees the full tensors.

    Rank 0's values are broadcast, so only rank 0 has to have read them.
    """
    remote = ds_config.get("zero_optimization", {}).get("offload_param", {}).get("device", "none")

    def partition(module: nn.Module) -> None:
        # A holder, since zero.Init descends into children, which may not have been made yet.
        holder = nn.Module()
        for name, param in module.named_parameters(recurse=False):
            holder.register_parameter(name, param)
        remote_device = None if remote == "none" else remote
        deepspeed.zero.Init(
            module=holder, config_dict_or_path=ds_config, dtype=dtype, remote_device=remote_device
        )

    return partition
