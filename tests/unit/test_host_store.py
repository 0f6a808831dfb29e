"""What layers keep for backward: the same bits from the device, host memory and a file; bounded memory; order; full disks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stack.config.schema import MemoryConfig
from stack.errors import MemoryShortage
from stack.ops.host_store import SLAB, HostStore, Kept
from stack.ops.spill_file import PAGE, SpillFile, aligned_bytes

KB = 1024


def layer(seed: int, tokens: int = 61) -> list[Tensor]:
    """Hidden state, attention output and log-sum-exp of one layer, about 30 KB; lengths that divide nothing."""
    generator = torch.Generator().manual_seed(seed)
    hidden, mixed = torch.randn(2, 1, tokens, 120, generator=generator).to(torch.bfloat16)
    return [hidden, mixed, torch.randn(1, 3, tokens, generator=generator)]


def step(store: HostStore, layers: list[list[Tensor]]) -> None:
    """Forward keeps, backward takes; every bit has to come back."""
    kept = [store.keep([tensor.clone() for tensor in tensors]) for tensors in layers]
    for one, tensors in zip(reversed(kept), reversed(layers), strict=True):
        back = one.take()
        assert all(torch.equal(mine, true) for mine, true in zip(back, tensors, strict=True))


def spilling(folder: Path, host_bytes: int) -> HostStore:
    return HostStore(True, pin_memory=False, spill=SpillFile(folder), host_bytes=host_bytes)


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> HostStore:
    if request.param == "spill":
        return spilling(tmp_path, 96 * KB)
    return HostStore(request.param == "host", pin_memory=False)


@pytest.mark.parametrize("store", ["device", "host", "spill"], indirect=True)
def test_every_bit_comes_back_over_steps_and_shapes(store: HostStore) -> None:
    for tokens in (61, 61, 7, 150, 61, 1):
        step(store, [layer(seed, tokens) for seed in range(5)])
    assert store.used == 0


class Event:
    """Of a copy that never ends; tells that it was waited for."""

    def __init__(self, number: int, waited: list[int]):
        self.number, self.waited = number, waited

    def synchronize(self) -> None:
        self.waited.append(self.number)


def test_the_host_runs_no_more_than_two_layers_ahead_of_the_copies() -> None:
    store, waited = HostStore(True, pin_memory=False), []
    for number in range(5):
        kept = store.keep(layer(number))
        kept.ready = cast(Any, Event(number, waited))
    assert waited == [0, 1, 2]


def test_page_locked_memory_that_runs_out_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells of it in the words that it has for the card's memory."""

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nand more")

    store = HostStore(True, pin_memory=True)
    store.slab = 64 * KB
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        MemoryShortage, match=r"(?s)no page-locked host memory.*CUDA error: out of memory\).*spill_folder"
    ):
        store.borrow(100 * KB, torch.device("cuda"))


def test_what_is_kept_is_a_copy_of_any_layout() -> None:
    store, whole = HostStore(True, pin_memory=False), torch.arange(24.0).view(4, 6)
    kept = store.keep([whole.t(), whole[:, 2], torch.tensor(3.0), torch.empty(0, 4)])
    whole.zero_()
    turned, column, number, nothing = kept.take()
    assert torch.equal(turned, torch.arange(24.0).view(4, 6).t())
    assert column.tolist() == [2, 8, 14, 20] and number.item() == 3 and nothing.shape == (0, 4)


def test_memory_stays_at_the_most_that_was_in_use_whatever_the_shapes() -> None:
    store, most = HostStore(True, pin_memory=False), 0
    for tokens in (61, 40, 23, 60, 17, 61, 5):
        kept = [store.keep(layer(seed, tokens)) for seed in range(4)]
        most = max(most, store.used)
        while kept:
            kept.pop().take()
        held = sum(slab.numel() for slab, _ in store._free)
        assert store.used == 0 and held <= most
    assert (
        most <= 4 * 2 * store.slab
    )  # no layer is larger than the first: at most one slab more each for the rest


def test_a_larger_layer_gets_larger_slabs() -> None:
    store = HostStore(True, pin_memory=False)
    step(store, [layer(0, 1)])
    small = store.slab
    step(store, [layer(0, 500)])
    assert small < store.slab <= SLAB
    assert all(slab.numel() == store.slab for slab, _ in store._free)


def test_what_is_taken_next_comes_back_meanwhile_unless_told_otherwise() -> None:
    store = HostStore(True, pin_memory=False)
    first, second, third = (store.keep(layer(seed)) for seed in range(3))
    third.take(fetch_next=False)
    assert second.arriving is None
    store.fetch_next()
    assert second.arriving is not None and first.arriving is None
    second.take()
    assert first.arriving is not None
    first.take()
    store.fetch_next()  # nothing is left


def test_oldest_layers_spill_and_are_read_ahead_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = spilling(tmp_path, 96 * KB), []
    plain = Kept.read
    monkeypatch.setattr(Kept, "read", lambda kept: (read.append(layers.index(kept)), plain(kept)))
    layers: list[Kept] = []
    for seed in range(8):
        layers.append(store.keep(layer(seed)))
        assert store.used <= 96 * KB
    held = [at for at, kept in enumerate(layers) if kept.host]
    assert held == [5, 6, 7]  # three of 32 KB
    for at in range(7, -1, -1):
        layers[at].take()
        assert store.used <= 96 * KB
        # By the time that a layer's turn comes, it has been asked for.
        assert not read or min(read) < at or at == 0
    assert read == [4, 3, 2, 1, 0]


def test_the_file_is_used_again_and_has_no_name(tmp_path: Path) -> None:
    store = spilling(tmp_path, 96 * KB)
    assert store.spill is not None and list(tmp_path.iterdir()) == []
    sizes = set()
    for _ in range(4):
        step(store, [layer(seed) for seed in range(8)])
        sizes.add(os.fstat(store.spill._file).st_size)
    assert len(sizes) == 1 and 0 < sizes.pop() <= 8 * 32 * KB


def test_a_bound_below_one_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MemoryShortage, match=r"memory\.host_gib=.*GiB a rank\. Fix: memory\.host_gib=1 or more"
    ):
        step(spilling(tmp_path, 16 * KB), [layer(0)])


def test_a_full_disk_names_folder_needed_and_free(tmp_path: Path) -> None:
    store = spilling(tmp_path, 64 * KB)
    assert store.spill is not None
    store.spill._file = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(MemoryShortage) as caught:
        step(store, [layer(seed) for seed in range(8)])
    text = str(caught.value)
    assert (
        str(tmp_path) in text and "No space left" in text and "are free" in text and "memory.host_gib" in text
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(MemoryShortage, match=r"memory\.spill_folder=.*missing"):
        HostStore.of(
            MemoryConfig(lean=True, offload=True, host_gib=1, spill_folder=str(tmp_path / "missing"))
        )


def test_a_lost_file_is_no_endless_read(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path)
    place, written = spill.write([aligned_bytes(4 * PAGE)], None)
    written.result()
    os.ftruncate(spill._file, PAGE)
    with pytest.raises(MemoryShortage, match="ends at"):
        spill.read(place, [aligned_bytes(4 * PAGE)], None).result()


def test_settings_reach_the_store(tmp_path: Path) -> None:
    memory = MemoryConfig(lean=True, offload=True, host_gib=0.5, spill_folder=str(tmp_path))
    store = HostStore.of(memory)
    assert store.offload and store.host_bytes == 2**29 and store.spill is not None
    assert HostStore.of(MemoryConfig(offload=False)).spill is None
