"""One process in place of all ranks, and a device that is not there in place of a GPU, for `bench/exact.py`."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.real_accelerator import set_accelerator


def compare_no_ranks() -> None:
    """DeepSpeed checks at each step that all ranks gather the same parameters, by numbers that do not exist here. The
    exchange of them is made, so that it counts; what rank 0 sent is what it has."""

    def compared(ints: list[int]) -> None:
        accelerator = get_accelerator()
        assert accelerator is not None
        device = torch.device(accelerator.device_name(0))
        for sent in ([len(ints)], ints):
            comm.broadcast(torch.tensor(sent, dtype=torch.int64, device=device), src=0, async_op=False)

    setattr(coordinator, "assert_ints_same_as_other_ranks", compared)  # noqa: B010  as in stack/patches.py


class VirtualAccelerator(CPU_Accelerator):
    """What DeepSpeed asks of a device, answered for `stack/bench/virtual_device.py`. Streams do not exist, so a tensor is
    free when its last user lets go."""

    def __init__(self, name: str):
        super().__init__()
        self._name, self._communication_backend_name = name, "alone"

    def device_name(self, device_index: Any = None) -> str:
        return self._name if device_index is None else f"{self._name}:0"

    def device(self, device_index: Any = None) -> Any:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{self._name}:0"

    def device_count(self) -> int:
        return 1

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def is_fp16_supported(self) -> bool:
        return True

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> Any:
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True

    def create_op_builder(self, op_name: str) -> Any:
        # It would compile a way through shared memory for real CPU ranks, under a lock.
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)


def compute_on(device: torch.device) -> None:
    """Make DeepSpeed take `device` for its accelerator, the virtual one or the CPU. Before an engine is built."""
    set_accelerator(CPU_Accelerator() if device.type == "cpu" else VirtualAccelerator(device.type))
