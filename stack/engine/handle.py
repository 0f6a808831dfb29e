"""The engine as the loop sees it. This file is the only place that scales a loss.

The loss of a step is the mean over its target tokens, on all ranks and in all micro-batches: sum / num_targets. DeepSpeed
averages gradients over all ranks at every ZeRO stage (it is not told of sequence parallelism, so no stage has a rule of
its own), hence each rank's sum is scaled by world / num_targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor, nn

from stack.data.batch import MicroBatch
from stack.engine.capture import HostCopies
from stack.engine.fill import Source, fill
from stack.engine.module import StepModule
from stack.engine.on_disk import remove_files, show_files
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


class _Collector(CheckpointEngine):
    """Stands where DeepSpeed's engine has its writer of files: takes what is to be written, and touches no disk. Reading
    is left to the writer in whose place it stands."""

    def __init__(self, inner: CheckpointEngine):
        super().__init__()
        self._inner = inner
        self.restart(Path(), None)

    def restart(self, folder: Path, copies: HostCopies | None) -> None:
        self._folder, self._copies = folder, copies
        self._contents: dict[str, Any] = {}
        self._error: Exception | None = None
        if copies is not None:
            copies.restart()

    def take(self) -> dict[str, Any]:
        contents, self._contents = self._contents, {}
        if self._error is not None:
            raise self._error
        return contents

    @contextmanager
    def errors_put_off(self) -> Iterator[None]:
        """Until `take`: the other ranks wait in DeepSpeed's barriers."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised by `take`
            self._error = error

    def save(self, state_dict: Any, path: str) -> None:
        with self.errors_put_off():
            kept = state_dict if self._copies is None else self._copies.copy(state_dict)
            self._contents[Path(path).relative_to(self._folder).as_posix()] = kept

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._inner.load(path, map_location=map_location)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def create(self, info: Any) -> None:
        pass

    def commit(self, info: Any) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # DeepSpeed would clone each tensor first; the copy here leaves sharing as it is


class Engine:
    """A DeepSpeed engine that takes optimizer steps of any number of micro-batches."""

    def __init__(self, engine: Any, module: StepModule, world: int, clip: float, device: torch.device):
        self._engine = engine
        self._module = module
        self._world = world
        self._clip = clip
        self._device = device
        self._torch_norm: float | None = None
        self._copies = HostCopies()
        self._collector = engine.checkpoint_engine = _Collector(engine.checkpoint_engine)
        # It would put scripts beside the checkpoints, on rank 0 alone and between barriers.
        engine._copy_recovery_script = lambda folder: None
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

    def capture(
        self, folder: Path, tag: str, client_state: dict[str, Any], to_host: bool = True
    ) -> dict[str, Any]:
        """What this rank adds to the checkpoint `folder/tag`, which exists: path inside it -> content. Collective.

        to_host: the contents are copies in host memory, valid until the next call; otherwise the states themselves, to be
        written before the next step. States on an NVMe disk are then read from there as they are written.
        Raises OSError or RuntimeError once DeepSpeed's collectives are through, if a rank cannot copy.
        """
        self._collector.restart(folder / tag, self._copies if to_host else None)
        # DeepSpeed would copy the files of states on NVMe, in between its barriers, and read a part of them back.
        self._engine.zero_nvme_offload_optimizer = lambda: False
        with self._collector.errors_put_off():
            show_files(self._engine.optimizer)
        try:
            self._engine.save_checkpoint(str(folder), tag=tag, client_state=client_state, save_latest=False)
        finally:
            del self._engine.zero_nvme_offload_optimizer
        contents = self._collector.take()
        if to_host and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return contents

    def load(self, folder: Path, tag: str) -> dict[str, Any]:
        """Read what `capture` gave, once written, at the same number of ranks and stage; not into states on NVMe. Returns the
        client state."""
        groups = self._engine.optimizer.param_groups
        # The rate stays the saved one until the schedule sets the next step's: a run that stopped behind its last step, and
        # saves again without another, would else write the peak rate. So in `fill`.
        asked = [
            {key: value for key, value in group.items() if key not in ("params", "lr")} for group in groups
        ]
        path, client_state = self._engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise CheckpointError(f"DeepSpeed found no checkpoint {tag!r} in {folder}")
        # The checkpoint brings its own betas, eps and weight decay along; this run's settings are those of its config.
        for group, settings in zip(self._engine.optimizer.param_groups, asked, strict=True):
            group.update(settings)
        return client_state

    def fill(self, source: Source, with_states: bool = True) -> None:
        """Take weights and optimizer states from `source`, at whatever number of ranks and stage they were saved.
        Collective. with_states: False lets the optimizer start anew."""
        fill(self._engine, self.model, source, with_states)

    def close(self) -> None:
        """Remove DeepSpeed's hooks, buffers and files, so that another engine can live in this process."""
        remove_files(self._engine.optimizer)
        self._engine.destroy()
