"""DeepSpeed's asynchronous reads and writes of tensors, by plain ones: its own take minutes to compile and need libaio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SMALLEST = 1024
"""Bytes of a vector that goes to the disk in these tests, in place of 1 MiB."""

_locked: list[Tensor] = []


class Handle:
    """What DeepSpeed's swappers use of `aio_handle`. All is done at once; `wait` returns the number of calls before it."""

    def __init__(self, **settings: Any):
        self._calls = 0

    def new_cpu_locked_tensor(self, numel: int, like: Tensor) -> Tensor:
        _locked.append(torch.empty(numel, dtype=like.dtype))
        return _locked[-1]

    def free_cpu_locked_tensor(self, tensor: Tensor) -> None:
        _locked[:] = [each for each in _locked if each is not tensor]

    def is_pinned(self, tensor: Tensor) -> bool:
        own = tensor.untyped_storage().data_ptr()
        return tensor.numel() > 0 and any(each.untyped_storage().data_ptr() == own for each in _locked)

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        found = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=buffer.dtype)
        buffer.copy_(found[: buffer.numel()])
        return self._count(offset)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        Path(path).write_bytes(buffer.detach().numpy().tobytes())
        return self._count(offset)

    def _count(self, offset: int) -> int:
        assert offset == 0, "DeepSpeed's swappers write whole files"
        self._calls += 1
        return 0

    def wait(self) -> int:
        calls, self._calls = self._calls, 0
        return calls


class _Builder:
    def load(self, verbose: bool = True) -> Any:
        return type("Operators", (), {"aio_handle": Handle})


def use_plain_io() -> None:
    """In this process, for good."""
    from deepspeed.runtime.swap_tensor import (
        optimizer_utils,
        partitioned_optimizer_swapper,
        pipelined_optimizer_swapper,
    )

    optimizer_utils.MIN_AIO_BYTES = SMALLEST
    for module in (partitioned_optimizer_swapper, pipelined_optimizer_swapper):
        module.AsyncIOBuilder = _Builder
