"""From a plain model to an Engine: optimizer with its decay groups, then `deepspeed.initialize`."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from stack.config.schema import OptimConfig
from stack.dist.topology import Topology
from stack.engine.handle import Engine
from stack.engine.module import StepModule


def build_engine(
    model: nn.Module, optim: OptimConfig, topology: Topology, ds_config: dict[str, Any]
) -> Engine:
    """model: built and changed by `apply_parallelism`; below ZeRO-3 it is moved to the device here.

    ds_config: the final DeepSpeed settings from `ds_config.build_ds_config`.
    """
    if ds_config["zero_optimization"]["stage"] < 3:
        model.to(topology.device)
    module = StepModule(model)
    optimizer = make_optimizer(model, optim, ds_config)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=ds_config, dist_init_required=False
    )
    _undo_early_step(engine.optimizer)
    return Engine(engine, module, topology.world, optim.clip, topology.device)


def _undo_early_step(optimizer: Any) -> None:
    """DeepSpeed's optimizers for 16 bit at ZeRO-0 make Adam's states by a step with zero gradients
    (`initialize_optimizer_states` in runtime/fp16): it decays the weights once and makes the first real step the second,
    0.75 as long."""
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        optimizer.refresh_fp32_params()
        optimizer.optimizer.state.clear()


def make_optimizer(model: nn.Module, optim: OptimConfig, ds_config: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters; matrices decay, norms and biases do not."""
    decay, plain = [], []
    for param in model.parameters():
        if param.requires_grad:
            # A ZeRO-3 shard is flat; its full shape is in ds_shape.
            (decay if len(getattr(param, "ds_shape", param.shape)) >= 2 else plain).append(param)
    groups = [
        {"params": params, "weight_decay": weight_decay}
        for params, weight_decay in ((decay, optim.weight_decay), (plain, 0.0))
        if params
    ]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    settings: dict[str, Any] = {"lr": optim.lr, "betas": tuple(optim.betas), "eps": optim.eps}
    on_host = ds_config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
    if on_host and ds_config.get("zero_force_ds_cpu_optimizer", True):
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    # One pass over a shard and no copy of it, on the GPU as on the host: 6 ms in place of 42 for 2.6 M parameters on a CPU.
    return torch.optim.AdamW(groups, fused=True, **settings)
