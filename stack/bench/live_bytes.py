"""Bytes of live tensors at every moment of a step: what a caching allocator would report on a GPU, for CPU ranks.

Every operator's results are seen as they are made; a storage is counted once, however many tensors view it, and taken off
when its last user lets go. Tensors moved to host memory by the offload of checkpoints are counted apart, since on a GPU
they would not lie in its memory. What a kernel uses inside one call is not seen.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from types import CodeType
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stack.ops.host_store import HostStore
from stack.ops.offload import OffloadToHost

FRAMES = 12
"""Callers looked at to tell where a storage is made: its maker, and this file's own functions."""


def _host_makers() -> set[CodeType]:
    """The functions that make host buffers: what they allocate would not be on a GPU."""
    hooks = [OffloadToHost(pin_memory=False).pack_hook, save_on_cpu(pin_memory=True).pack_hook]
    return {HostStore.borrow.__code__, *(hook.__code__ for hook in hooks)}


def _tensors_in(owner: object) -> list[Tensor]:
    """Tensors that `owner` holds, also in dicts, lists and tuples."""
    found, waiting = [], gc.get_referents(owner)
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict | list | tuple):
            waiting += gc.get_referents(item)
    return found


class LiveBytes(TorchDispatchMode):
    """Inside the `with`, `device` and `host` are the bytes alive now; `peak_device` and `peak_host` the most at any time.

    Tensors that exist before are found and counted on entering, but those of `HostStore` as host buffers.
    """

    COUNTS_FAKE = False
    """torch.compile keeps tensors that have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.device = self.host = self.peak_device = self.peak_host = self.at_start = 0
        self._known: dict[int, tuple[weakref.ref, int, bool]] = {}
        self._makers = _host_makers()

    def __enter__(self) -> Self:
        gc.collect()
        # Their types are asked, not the objects: some packages have objects that load a module when looked at.
        existing = [item for item in gc.get_objects() if issubclass(type(item), Tensor | HostStore)]
        for item in existing:
            if isinstance(item, HostStore):
                self._count(_tensors_in(item), host=True)
        self._count((item for item in existing if isinstance(item, Tensor)), host=False)
        self.at_start = self.device
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._call(func, types, args, kwargs or {})
        # Nearly always one tensor, for which looking through trees would take longer than all else here.
        leaves = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        self._count((leaf for leaf in leaves if isinstance(leaf, Tensor)), host=None)
        return result

    def _call(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _count(self, tensors: Iterable[Tensor], host: bool | None) -> None:
        """host: None to look at who made the tensor."""
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.device.type == "meta":
                continue
            if isinstance(tensor, FakeTensor) and not self.COUNTS_FAKE:
                continue
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
            if not isinstance(
                num_bytes, int
            ):  # of a symbolic size: torch.compile's own, with no memory anywhere
                continue
            if key in self._known:
                found, before, on_host = self._known[key]
                if num_bytes != before:  # resized
                    self._known[key] = (found, num_bytes, on_host)
                    self._add(num_bytes - before, on_host)
                    self._resized(key, num_bytes - before)
                continue
            on_host = self._made_for_host() if host is None else host
            gone = weakref.ref(storage, lambda _, key=key: self._forget(key))
            self._known[key] = (gone, num_bytes, on_host)
            self._add(num_bytes, on_host)

    def _made_for_host(self) -> bool:
        frame = sys._getframe(2)
        for _ in range(FRAMES):
            if frame is None:
                return False
            if frame.f_code in self._makers:
                return True
            frame = frame.f_back
        return False

    def _resized(self, key: int, by: int) -> None:
        """Is told of a storage that changed its size by so many bytes."""

    def _forget(self, key: int) -> None:
        _, num_bytes, on_host = self._known.pop(key)
        self._add(-num_bytes, on_host)

    def _add(self, num_bytes: int, on_host: bool) -> None:
        if on_host:
            self.host += num_bytes
            self.peak_host = max(self.peak_host, self.host)
        else:
            self.device += num_bytes
            self.peak_device = max(self.peak_device, self.device)
