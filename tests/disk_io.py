"""DeepSpeed's asynchronous reads and writes of tensors, by plain ones: its own take minutes to compile and need libaio."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SMALLEST = 1024
"""Bytes of a vector that goes to the disk in these tests, in place of 1 MiB."""

_locked: list[Tensor] = []


class Handle:
    """What DeepSpeed's swappers use of `aio_handle`. Nothing is done before `wait`, which returns the number of calls."""

    def __init__(self, **settings: Any):
        self._waiting: list[Callable[[], object]] = []

    def new_cpu_locked_tensor(self, numel: int, like: Tensor) -> Tensor:
        _locked.append(torch.empty(numel, dtype=like.dtype))
        return _locked[-1]

    def free_cpu_locked_tensor(self, tensor: Tensor) -> None:
        _locked[:] = [each for each in _locked if each is not tensor]

    def is_pinned(self, tensor: Tensor) -> bool:
        own = tensor.untyped_storage().data_ptr()
        return tensor.numel() > 0 and any(each.untyped_storage().data_ptr() == own for each in _locked)

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        return self._put_off(partial(_read, buffer, Path(path)), offset)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        return self._put_off(partial(_write, buffer, Path(path)), offset)

    def _put_off(self, action: Callable[[], object], offset: int) -> int:
        assert offset == 0, "DeepSpeed's swappers write whole files"
        self._waiting.append(action)
        return 0

    def wait(self) -> int:
        waiting, self._waiting = self._waiting, []
        assert waiting, "nothing to wait for"
        for action in waiting:
            action()
        return len(waiting)


def _read(buffer: Tensor, path: Path) -> None:
    buffer.copy_(torch.frombuffer(bytearray(path.read_bytes()), dtype=buffer.dtype)[: buffer.numel()])


def _write(buffer: Tensor, path: Path) -> None:
    with open(path, "r+b" if path.exists() else "wb") as file:  # a longer file stays as long
        file.write(buffer.detach().numpy().tobytes())


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
        setattr(module, "AsyncIOBuilder", _Builder)  # noqa: B010  pyright knows no such name in a module
