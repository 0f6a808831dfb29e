"""Copies of an engine's state in host memory, so that it can be written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every plain tensor and parameter in nested dicts, lists and tuples."""
    if type(value) in (Tensor, nn.Parameter):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def tensor_bytes(value: Any) -> int:
    """Bytes that the tensors in `value` take in a file. Memory that several of them share is written once, and whole."""
    storages = {
        storage._cdata: storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors_in(value))
    }
    return sum(storages.values())


class HostCopies:
    """Copies nested values into host buffers, which are used again from save to save: the sizes are the same each time,
    and new memory costs as much time as the copy (4 KiB pages; page-locking for a device is slower still).

    A copy is valid until the next `restart`.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0

    def restart(self) -> None:
        """The copies made so far are no longer needed."""
        self._used = 0

    def copy(self, value: Any) -> Any:
        """A deep copy whose tensors lie on the CPU. What shares memory in `value` shares it in the copy, so that the
        files are as large as those of the original. Copies from a device are under way until it is synchronized."""
        storages: dict[int, UntypedStorage] = {}
        # deepcopy takes from `memo` what is there already, and copies everything else (scalers, settings) by itself.
        memo: dict[int, Any] = {}
        for tensor in tensors_in(value):
            twin = memo[id(tensor)] = self._copy_tensor(tensor, storages)
            # Names that DeepSpeed gave it: torch.save keeps them.
            vars(twin).update(copy.deepcopy(vars(tensor), memo))
        return copy.deepcopy(value, memo)

    def _copy_tensor(self, tensor: Tensor, storages: dict[int, UntypedStorage]) -> Tensor:
        source = tensor.untyped_storage()
        if source._cdata not in storages:
            storages[source._cdata] = self._copy_storage(source)
        twin = torch.empty(0, dtype=tensor.dtype)
        twin.set_(storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    def _copy_storage(self, source: UntypedStorage) -> UntypedStorage:
        size, on_device = source.nbytes(), source.device.type != "cpu"
        if self._used == len(self._buffers) or self._buffers[self._used].numel() != size:
            self._buffers[self._used :] = [torch.empty(size, dtype=torch.uint8, pin_memory=on_device)]
        buffer = self._buffers[self._used]
        self._used += 1
        flat = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
        buffer.copy_(flat, non_blocking=on_device)
        return buffer.untyped_storage()
