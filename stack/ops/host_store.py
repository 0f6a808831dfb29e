"""What a layer keeps for its backward: on the device, in host memory, or beyond that in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future

import torch
from torch import Tensor

from stack.config.kept import ALIGN, PAGE, SLAB, up_to
from stack.config.schema import MemoryConfig
from stack.errors import MemoryShortage
from stack.ops.spill_file import Place, SpillFile, aligned_bytes

AHEAD = 2
"""Layers whose copies to the host may be under way at once."""

FEW = 64
"""Slabs of one layer beyond which larger ones are made: a first layer may have been a small one."""


class HostStore:
    """Keeps tensors between forward and backward of a step. What was kept last is taken first.

    offload: copy them to host memory, and back when they are asked for. On a CUDA device copies run on a stream of their
    own beside the computation; CPU ranks make the same copies, one after the other.

    Host memory is cut into slabs of one size, used again from layer to layer and step to step, since page-locking is slow
    (about 1 s for 4 GiB). Any tensors fit into any slabs, so there are never more than were in use at once, whatever the
    shapes.

    spill: with it, slabs in use take at most `host_bytes`. The layers kept first, which backward wants last, go to the file
    while later ones are computed, and come back into the slabs that backward has done with.
    """

    def __init__(
        self, offload: bool, pin_memory: bool, spill: SpillFile | None = None, host_bytes: int | None = None
    ):
        self.offload, self.pin_memory = offload, pin_memory
        self.spill, self.host_bytes = spill, host_bytes if spill is not None else None
        self.slab = self.used = 0
        """Bytes of a slab, and of all in use."""
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._kept: list[Kept] = []
        self._stream: torch.cuda.Stream | None = None

    @classmethod
    def of(cls, memory: MemoryConfig) -> HostStore:
        """As the settings say. Raises MemoryShortage if no file can be made in `memory.spill_folder`."""
        spill = SpillFile(memory.spill_folder) if memory.spill_folder else None
        host_bytes = None if memory.host_gib is None else int(memory.host_gib * 2**30)
        return cls(memory.offload, memory.pin_memory, spill, host_bytes)

    def keep(self, tensors: list[Tensor]) -> Kept:
        kept = Kept(self, tensors)
        if self.offload:
            self._kept.append(kept)
            self._write_behind(kept.num_bytes)
            self._wait_for_the_device()
        return kept

    def _wait_for_the_device(self) -> None:
        """The host queues kernels far ahead of the device, and what a layer keeps stays there until its copy is through:
        without a bound, that of all layers queued."""
        if len(self._kept) > AHEAD and (copied := self._kept[-1 - AHEAD].ready) is not None:
            copied.synchronize()

    def fetch_next(self) -> None:
        """Start the way back to the device of what is taken next, unless the disk still has it."""
        if self._kept and self._kept[-1].in_memory:
            self._kept[-1].fetch()

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def borrow(self, num_bytes: int, device: torch.device) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Slabs for `num_bytes`, and when they may be overwritten."""
        if num_bytes > FEW * self.slab and self.slab < SLAB and not self._kept:
            self._free.clear()
            self.slab = up_to(min(num_bytes, SLAB), 1 if self.spill is None else PAGE)
        slabs, ready, number = [], None, -(-num_bytes // self.slab)
        self._make_room(number * self.slab)
        for _ in range(number):
            if self._free:
                # Copies run in order, so the event of the slab given back last is enough.
                slab, event = self._free.pop(0)
                ready = event or ready
            elif self.pin_memory and device.type == "cuda":
                slab = self._page_locked()
            elif self.spill is not None:
                slab = aligned_bytes(self.slab)
            else:
                slab = torch.empty(self.slab, dtype=torch.uint8, device="cpu")
            slabs.append(slab)
        self.used += number * self.slab
        return slabs, ready

    def _page_locked(self) -> Tensor:
        try:
            return torch.empty(self.slab, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:  # CUDA calls it its own memory, as it does the card's
            if "out of memory" not in str(error):
                raise
            raise MemoryShortage(
                f"no page-locked host memory for what layers keep: {self.used / 2**30:.1f} GiB are in use by this rank ("
                f"{str(error).splitlines()[0]}). Fix: memory.spill_folder=FOLDER (on a local disk) with memory.host_gib, "
                "memory.pin_memory=false, or fewer ranks a node"
            ) from error

    def give_back(self, slabs: list[Tensor], ready: torch.cuda.Event | None) -> None:
        self.used -= len(slabs) * self.slab
        self._free += [(slab, ready) for slab in slabs]

    def forget(self, kept: Kept) -> None:
        """What was taken needs a place neither in the file nor in line; what comes next is read ahead."""
        self._kept.remove(kept)
        if self.spill is None or self.host_bytes is None:
            return
        if kept.place is not None:
            self.spill.free()
        for coming in reversed(self._kept):
            if not coming.host:
                if self.used + coming.num_bytes + self.slab > self.host_bytes:
                    return
                coming.read()

    def _write_behind(self, num_bytes: int) -> None:
        """Start writing so early that the next layer, of the same size, finds room."""
        if self.host_bytes is None:
            return
        unwritten = [kept for kept in self._kept if kept.place is None]
        while unwritten and self._bytes_of(unwritten) + num_bytes > self.host_bytes:
            unwritten.pop(0).write()

    def _make_room(self, num_bytes: int) -> None:
        if self.host_bytes is None:
            return
        while self.used + num_bytes > self.host_bytes:
            oldest = next((kept for kept in self._kept if kept.host), None)
            if oldest is None:
                raise MemoryShortage(
                    f"memory.host_gib={self.host_bytes / 2**30:.3g}: a layer keeps {num_bytes / 2**30:.3g} GiB a rank. Fix: "
                    f"memory.host_gib={math.ceil(3 * num_bytes / 2**30)} or more"
                )
            oldest.leave_memory()

    @staticmethod
    def _bytes_of(layers: list[Kept]) -> int:
        return sum(slab.numel() for kept in layers for slab in kept.host)


class Kept:
    """The tensors of one layer. `take` gives them back once."""

    def __init__(self, store: HostStore, tensors: list[Tensor]):
        self.store, self.device = store, tensors[0].device
        self.arriving: list[Tensor] | None = None
        self.arrived: torch.cuda.Event | None = None
        self.host: list[Tensor] = []
        """Its slabs."""
        if not store.offload:
            self.arriving = tensors
            return
        tensors = [tensor.contiguous() for tensor in tensors]
        self.forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self.num_bytes = sum(up_to(_num_bytes(*form), ALIGN) for form in self.forms)
        self.place: Place | None = None
        self.moving: Future[None] | None = None
        """The way to the file, or from it."""
        self.host, self.ready = store.borrow(self.num_bytes, self.device)
        stream = store.stream(self.device)
        if stream is None:
            self._copy(tensors, to_host=True)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._copy(tensors, to_host=True)
            for tensor in tensors:
                # The allocator must not hand the memory on while the copy still reads it.
                tensor.record_stream(stream)
            self.ready = _event(stream)

    def _copy(self, tensors: list[Tensor], to_host: bool) -> None:
        for part, slab in self._pieces(tensors):
            target, source = (slab, part) if to_host else (part, slab)
            target.copy_(source, non_blocking=True)

    def _pieces(self, tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of the tensors, each beside its place in a slab."""
        start, size = 0, self.host[0].numel()
        for tensor in tensors:
            flat = tensor.view(-1).view(torch.uint8)
            at = 0
            while at < flat.numel():
                slab, offset = divmod(start + at, size)
                length = min(flat.numel() - at, size - offset)
                yield flat[at : at + length], self.host[slab][offset : offset + length]
                at += length
            start += up_to(flat.numel(), ALIGN)

    @property
    def in_memory(self) -> bool:
        return bool(self.host) and (self.moving is None or self.moving.done())

    def write(self) -> None:
        """Start the way to the file; the slabs stay until `leave_memory`."""
        assert self.store.spill is not None
        self.place, self.moving = self.store.spill.write(self.host, self.ready)

    def leave_memory(self) -> None:
        """Once it is in the file."""
        if self.place is None:
            self.write()
        self._settle()
        self.store.give_back(self.host, None)
        self.host = []

    def read(self) -> None:
        """Start the way from the file."""
        assert self.store.spill is not None and self.place is not None
        self.host, free = self.store.borrow(self.num_bytes, self.device)
        self.moving = self.store.spill.read(self.place, self.host, free)

    def _settle(self) -> None:
        if self.moving is not None:
            self.moving.result()
            self.moving = None

    def fetch(self) -> None:
        """Start the way back to the device."""
        if self.arriving is not None:
            return
        if not self.host:
            self.read()
        self._settle()
        # Memory of the computation's own stream, so that it can be used again there without waiting.
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.forms]
        stream = self.store.stream(self.device)
        if stream is None:
            self._copy(tensors, to_host=False)
        else:
            # Whoever used that memory before has to be done with it.
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._copy(tensors, to_host=False)
                self.arrived = _event(stream)
        self.arriving = tensors

    def take(self, fetch_next: bool = True) -> list[Tensor]:
        """The tensors as they were kept. fetch_next: bring back at once what is taken next."""
        if self.store.offload:
            self.fetch()
        tensors, self.arriving = self.arriving, None
        assert tensors is not None
        if self.store.offload:
            if self.arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(self.arrived)
            self.store.give_back(self.host, self.arrived)
            self.host = []
            self.store.forget(self)
            if fetch_next:
                self.store.fetch_next()
        return tensors


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize
