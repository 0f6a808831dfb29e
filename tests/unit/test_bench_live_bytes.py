"""Live bytes of functions whose every tensor is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from stack.bench.live_bytes import LiveBytes
from stack.ops.host_store import HostStore
from stack.ops.offload import OffloadToHost

KB = 1024


def block(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes // 4)


@pytest.fixture
def live() -> Iterator[LiveBytes]:
    with LiveBytes() as tracker:
        yield tracker


def test_peak_is_the_most_at_one_time(live: LiveBytes) -> None:
    first = block(64 * KB)
    second = first + 1  # a second storage
    assert live.device - live.at_start == 128 * KB
    del first
    third = block(16 * KB)
    assert live.device - live.at_start == 80 * KB
    assert live.peak_device - live.at_start == 128 * KB
    del second, third
    assert live.device == live.at_start


def test_views_and_changes_in_place_count_nothing(live: LiveBytes) -> None:
    first = block(64 * KB)
    seen = first.view(2, -1)[0].t()
    first.mul_(2)
    seen.add_(1)
    assert live.device - live.at_start == 64 * KB
    del first
    assert live.device - live.at_start == 64 * KB  # the view holds it
    del seen
    assert live.device == live.at_start


def test_what_was_there_before_counts_until_it_goes() -> None:
    before = block(256 * KB)
    with LiveBytes() as live:
        assert live.at_start >= 256 * KB
        before.add_(1)
        assert live.device == live.at_start
        del before
        assert live.at_start - live.device == 256 * KB


def test_a_resized_storage_counts_with_its_new_size(live: LiveBytes) -> None:
    first = block(64 * KB)
    first.resize_(32 * KB)  # elements of 4 bytes
    assert live.device - live.at_start == 128 * KB


def test_tensors_saved_for_backward_live_until_backward(live: LiveBytes) -> None:
    weight = torch.ones(16 * KB, requires_grad=True)  # 64 KB
    product = (weight * 2).exp()  # two results of 64 KB; exp keeps its own, the other goes
    assert live.device - live.at_start == 128 * KB
    loss = product.sum()
    del product
    loss.backward()
    del loss
    assert live.device - live.at_start == 128 * KB  # weight and its gradient
    weight.grad = None
    assert live.device - live.at_start == 64 * KB


@pytest.mark.parametrize("offload", [lambda: OffloadToHost(False), lambda: save_on_cpu(pin_memory=True)])
def test_offloaded_tensors_count_on_the_host(live: LiveBytes, offload) -> None:
    leaf = torch.ones(32 * KB, requires_grad=True)  # 128 KB, above the smallest that is offloaded
    hidden = leaf * 2
    with offload():
        output = checkpoint(torch.exp, hidden, use_reentrant=False)
    assert isinstance(output, Tensor)
    assert live.host == 128 * KB
    del hidden
    assert live.device - live.at_start == 256 * KB  # leaf and output
    output.sum().backward()
    del output
    assert live.host == 0
    assert live.peak_host == 128 * KB


def test_buffers_of_a_host_store_count_on_the_host_from_step_to_step() -> None:
    store = HostStore(offload=True, pin_memory=False)
    value = torch.ones(32 * KB)
    store.keep([value]).take()
    with LiveBytes() as live:
        assert live.host == 128 * KB
        kept = store.keep([value, value + 1])  # one buffer is there, the other is made
        assert live.host == 256 * KB
        returned = kept.take()
        assert live.device - live.at_start == 256 * KB
        del returned
        assert (live.device - live.at_start, live.host) == (0, 256 * KB)


def test_tensors_without_memory_that_torch_compile_keeps_are_not_counted():
    with FakeTensorMode():
        kept = torch.empty(1 << 20)
    with LiveBytes() as live:
        before = live.device
        with FakeTensorMode():
            made = torch.empty(1 << 20)
        assert live.device == before
    assert kept.numel() == made.numel()
