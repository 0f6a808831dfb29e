"""The engine as the loop sees it. This file is the only place that scales a loss.

The loss of a step is the mean over its target tokens, on all ranks and in all micro-batches: sum / num_targets. DeepSpeed
averages gradients over all ranks at every ZeRO stage (it is not told of sequence parallelism, so no stage has a rule of
its own), hence each rank's sum is scaled by world / num_targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from stack.data.batch import MicroBatch
from stack.engine.module import StepModule
from stack.errors import CheckpointError
from stack.methods.base import Method


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. grad_norm: global norm before clipping. skipped: None, "loss-scale" (fp16 scaler) or
    "nonfinite": then weights and optimizer states are unchanged."""

    grad_norm: float
    clipped: bool
    skipped: str | None
    loss_scale: float | None


class Engine:
    """A DeepSpeed engine that takes optimizer steps of any number of micro-batches."""

    def __init__(self, engine: Any, module: StepModule, world: int, clip: float, device: torch.device):
        self._engine = engine
        self._module = module
        self._world = world
        self._clip = clip
        self._device = device
        self._torch_norm: float | None = None
        if not hasattr(engine.optimizer, "overflow"):
            # ZeRO-0 in fp32 runs the bare torch optimizer, which knows neither norms nor non-finite gradients.
            engine.basic_optimizer.register_step_pre_hook(self._guard_torch_step)
        elif hasattr(engine.optimizer, "check_grad_overflow"):
            # ZeRO-1/2 look for non-finite gradients in 16 bit only, unless told to.
            engine.optimizer.check_grad_overflow = True

    @property
    def model(self) -> nn.Module:
        return self._module.model

    def forward_backward(self, method: Method, batch: MicroBatch, num_targets: int) -> Tensor:
        """Add one micro-batch to the gradients of this step.

        batch: this rank's slice. num_targets: of the whole step, over all ranks and micro-batches. Returns the local sum
        of token losses, detached, fp32.
        """
        scale = self._world / max(num_targets, 1)
        loss = self._engine(method, self._to_device(batch), scale)
        local_sum = loss.detach().float() / scale
        # A non-finite loss must not pass with finite gradients: made NaN, every stage on every rank skips the step.
        poison = torch.where(torch.isfinite(local_sum), 1.0, math.nan)
        self._engine.backward(loss * poison, scale_wrt_gas=False)
        return local_sum

    def step(self, lr: float) -> StepResult:
        """Average the gradients over all ranks, clip, update. lr: learning rate of this step."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        dynamic = bool(getattr(scaler, "dynamic", False))
        loss_scale = float(self._engine.optimizer.loss_scale) if dynamic else None
        self._engine.step()
        norm = self._torch_norm if self._torch_norm is not None else self._engine.get_global_grad_norm()
        overflow = bool(getattr(self._engine.optimizer, "overflow", False))
        norm = math.inf if norm is None or overflow else float(norm)
        skipped = None
        if not math.isfinite(norm):
            skipped = "loss-scale" if dynamic else "nonfinite"
        return StepResult(norm, clipped=0 < self._clip < norm, skipped=skipped, loss_scale=loss_scale)

    def _guard_torch_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        params = [
            param for group in optimizer.param_groups for param in group["params"] if param.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm([param.grad for param in params])
        self._torch_norm = float(norm)
        if not math.isfinite(self._torch_norm):
            for param in params:
                param.grad = None
        elif self._clip > 0:
            torch.nn.utils.clip_grads_with_norm_(params, self._clip, norm)

    @torch.no_grad()
    def evaluate(self, method: Method, batch: MicroBatch) -> Tensor:
        """Local sum of token losses of this rank's slice, fp32; no gradient, dropout off."""
        self._engine.eval()
        try:
            return self._engine(method, self._to_device(batch), 1.0).float()
        finally:
            self._engine.train()

    def _to_device(self, batch: MicroBatch) -> MicroBatch:
        # Document boundaries stay on the CPU: attention reads them as numbers.
        moved = {
            field.name: getattr(batch, field.name).to(self._device, non_blocking=True)
            for field in fields(batch)
            if field.name != "cu_seqlens" and isinstance(getattr(batch, field.name), Tensor)
        }
        return replace(batch, **moved)

    def named_full_parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each parameter of the model, whole, in CPU memory on rank 0 and None elsewhere; one at a time.

        Collective: every rank must run the iterator to its end. Tied parameters come once, under their first name.
        """
        for name, param in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                yield name, param.detach().to("cpu", copy=True) if self._engine.global_rank == 0 else None

    def save(self, folder: Path, tag: str, client_state: dict[str, Any]) -> None:
        """Write model, optimizer and `client_state` of every rank below `folder/tag`. Collective."""
        self._engine.save_checkpoint(str(folder), tag=tag, client_state=client_state, save_latest=False)

    def load(self, folder: Path, tag: str) -> dict[str, Any]:
        """Read what `save` wrote, at the same number of ranks and stage. Returns the client state."""
        groups = self._engine.optimizer.param_groups
        asked = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        path, client_state = self._engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise CheckpointError(f"DeepSpeed found no checkpoint {tag!r} in {folder}")
        # The checkpoint brings its own betas, eps and weight decay along; this run's settings are those of its config.
        for group, settings in zip(self._engine.optimizer.param_groups, asked, strict=True):
            group.update(settings)
        return client_state

    def close(self) -> None:
        """Remove DeepSpeed's hooks and buffers, so that another engine can live in this process."""
        self._engine.destroy()
