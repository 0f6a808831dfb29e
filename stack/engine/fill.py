"""Filling a live engine parameter by parameter: fp32 weights and optimizer states, whatever the ZeRO stage and number of ranks.

DeepSpeed loads only what was saved at the same number of ranks and stage. Here each rank asks a source for the ranges that
it keeps itself and writes them where its optimizer has them, so that no rank holds more than its share and one range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn

from stack.engine.on_disk import at_hand, forget_states

WEIGHT = "weight"


class Source(Protocol):
    """What an engine can be filled from; see `checkpoint/zero_files.py`."""

    states: set[str]
    step: float
    lr: float
    loss_scaler: Any

    def read(
        self, name: str, key: str, start: int, numel: int, dtype: torch.dtype = torch.float32
    ) -> Tensor: ...


@dataclass(frozen=True)
class _Part:
    """Elements of a flattened parameter from `start` on, which this rank keeps in `vector` from `offset` on."""

    param: nn.Parameter
    start: int
    numel: int
    vector: Tensor
    offset: int


def fill(engine: Any, model: nn.Module, source: Source, with_states: bool) -> None:
    """Collective. engine: DeepSpeed's. with_states: optimizer states too; without, they start anew."""
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer: Any = engine.optimizer
    sharded = hasattr(optimizer, "fp32_partitioned_groups_flat")
    base = getattr(optimizer, "optimizer", optimizer)  # ZeRO-0 in fp32 has none around torch's
    if sharded:
        optimizer.checkpoint_event_prologue()  # takes whole parameters apart
    with torch.no_grad():
        base.state.clear()
        forget_states(optimizer)
        for part in _parts(optimizer):
            name = names[id(part.param)]
            _write(part, part.vector, source.read(name, WEIGHT, part.start, part.numel))
            for key, state in _states(base, part.vector, source).items() if with_states else ():
                _write(part, state, source.read(name, key, part.start, part.numel))
        for param in model.parameters():
            if not param.requires_grad:
                _fill_frozen(param, names[id(param)], source, engine.global_rank if sharded else None)
        if not sharded:
            _publish(optimizer)
    if sharded:
        optimizer.checkpoint_event_epilogue()
    for group in optimizer.param_groups:
        group["lr"] = source.lr
    if source.loss_scaler is not None and getattr(optimizer, "dynamic_loss_scale", False):
        optimizer.loss_scaler = source.loss_scaler


def _write(part: _Part, target: Tensor, values: Tensor) -> None:
    target.data.view(-1)[part.offset : part.offset + part.numel].copy_(values)


def _parts(optimizer: Any) -> Iterator[_Part]:
    """Each is to be written before the next is asked for: with states on a disk, one group is at hand at a time."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        for group, (params, flat) in enumerate(groups):
            with at_hand(optimizer, group):
                offset = 0
                for param in params:
                    part = param.ds_tensor.numel()
                    start = optimizer._get_param_partition_rank(param) * part
                    yield _Part(param, start, max(0, min(part, param.ds_numel - start)), flat, offset)
                    offset += part
                # The weights that the model computes with, from the fp32 ones.
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
    elif hasattr(optimizer, "update_lp_params"):  # ZeRO-1 and 2; in bf16 ZeRO-1 is a class of its own
        groups = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
        for params, group in zip(groups, optimizer.optimizer.param_groups, strict=True):
            for param in params:
                if param._hp_mapping is not None:
                    here, there = param._hp_mapping.hp_fragment_address, param._hp_mapping.lp_fragment_address
                    yield _Part(param, there.start, here.numel, group["params"][0], here.start)
    else:  # ZeRO-0, in 16 bit with fp32 copies
        masters = getattr(optimizer, "fp32_groups", None) or [
            group["params"] for group in optimizer.param_groups
        ]
        params = getattr(optimizer, "fp16_groups", masters)
        for group, copies in zip(params, masters, strict=True):
            for param, master in zip(group, copies, strict=True):
                yield _Part(param, 0, param.numel(), master, 0)


def _states(base: torch.optim.Optimizer, vector: Tensor, source: Source) -> dict[str, Tensor]:
    """The states of `vector`, made as the optimizer makes them at its first step."""
    state = base.state[vector]
    if not state and source.states:
        group = base.param_groups[0]
        on_device = group.get("fused") or group.get("capturable")
        step = torch.tensor(source.step, dtype=torch.float32, device=vector.device if on_device else "cpu")
        state["step"] = int(source.step) if isinstance(base, DeepSpeedCPUAdam) else step
        for key in source.states:
            state[key] = torch.zeros_like(vector, requires_grad=False)
    return {key: state[key] for key in source.states}


def _fill_frozen(param: nn.Parameter, name: str, source: Source, rank: int | None) -> None:
    """rank: of this process where the parameter is cut into shards, else None."""
    target = param.data if rank is None else param.ds_tensor.data  # type: ignore[attr-defined]
    start = 0 if rank is None else rank * target.numel()
    whole = target.numel() if rank is None else param.ds_numel  # type: ignore[attr-defined]
    numel = max(0, min(target.numel(), whole - start))
    target.view(-1)[:numel].copy_(source.read(name, WEIGHT, start, numel))


def _publish(optimizer: Any) -> None:
    """Bring the weights that the model computes with into line with the fp32 ones."""
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp16_groups"):
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for param, master in zip(group, masters, strict=True):
                param.data.copy_(master)
