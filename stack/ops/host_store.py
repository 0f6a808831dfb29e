"""What a layer keeps for its backward, in host memory or on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class HostStore:
    """Keeps tensors between forward and backward of a step.

    offload: copy them to host memory, and back when they are asked for. Host buffers are used again from step to step,
    since page-locking memory is slow (about 1 s for 4 GiB); there are as many as a step keeps at once. On a CUDA device
    copies run on a stream of their own beside the computation, and taking one layer's tensors starts the copy of the
    layer that was kept before it, which backward wants next. CPU ranks make the same copies, one after the other.
    """

    def __init__(self, offload: bool, pin_memory: bool):
        self.offload, self.pin_memory = offload, pin_memory
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._last: Kept | None = None
        self._stream: torch.cuda.Stream | None = None

    def keep(self, tensors: list[Tensor]) -> Kept:
        kept = Kept(self, tensors, before=self._last)
        self._last = kept
        return kept

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def borrow(self, like: Tensor) -> Tensor:
        free = self._free.setdefault((like.shape, like.dtype), [])
        if free:
            return free.pop()
        pinned = self.pin_memory and like.device.type == "cuda"
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)

    def give_back(self, buffer: Tensor) -> None:
        self._free[(buffer.shape, buffer.dtype)].append(buffer)

    def forget(self, kept: Kept) -> None:
        if self._last is kept:
            self._last = kept.before


class Kept:
    """The tensors of one layer. `take` gives them back once."""

    def __init__(self, store: HostStore, tensors: list[Tensor], before: Kept | None):
        self.store, self.before = store, before
        self.device = tensors[0].device
        self.arriving: list[Tensor] | None = None
        if not store.offload:
            self.arriving = tensors
            return
        self.host = [store.borrow(tensor) for tensor in tensors]
        stream = store.stream(self.device)
        if stream is None:
            for buffer, tensor in zip(self.host, tensors, strict=True):
                buffer.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for buffer, tensor in zip(self.host, tensors, strict=True):
                buffer.copy_(tensor, non_blocking=True)
                # The allocator must not hand the memory on while the copy still reads it.
                tensor.record_stream(stream)

    def fetch(self) -> None:
        """Start the way back to the device."""
        if self.arriving is not None:
            return
        stream = self.store.stream(self.device)
        if stream is None:
            self.arriving = [buffer.clone() for buffer in self.host]
            return
        with torch.cuda.stream(stream):
            self.arriving = [buffer.to(self.device, non_blocking=True) for buffer in self.host]

    def take(self) -> list[Tensor]:
        """The tensors as they were kept; the layer kept before is fetched meanwhile."""
        self.fetch()
        stream = self.store.stream(self.device) if self.store.offload else None
        if stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(stream)
            for tensor in self.arriving or []:
                tensor.record_stream(current)
        if self.before is not None and self.store.offload and stream is not None:
            self.before.fetch()
        tensors, self.arriving = self.arriving, None
        assert tensors is not None
        if self.store.offload:
            for buffer in self.host:
                self.store.give_back(buffer)
            self.host = []
        self.store.forget(self)
        self.before = None
        return tensors
