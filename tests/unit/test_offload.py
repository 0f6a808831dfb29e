"""Offloaded activations: bit-equal, no aliasing, parameters untouched."""

from typing import Any, cast

import torch
from torch import nn

from stack.ops.offload import OffloadToHost


def test_gradients_are_bit_equal():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    hidden = torch.randn(512, 64, requires_grad=True)
    want = torch.autograd.grad(layer(hidden).sum(), [hidden, *layer.parameters()])
    with OffloadToHost(pin_memory=True):
        loss = layer(hidden).sum()
    got = torch.autograd.grad(loss, [hidden, *layer.parameters()])
    assert all(torch.equal(mine, true) for mine, true in zip(got, want, strict=True))


def test_saved_tensor_is_a_copy():
    """The device tensor may be overwritten after it was saved; backward sees what it was."""
    hidden = torch.randn(256, 256, requires_grad=True)
    saved = hidden * 1.0
    with OffloadToHost(pin_memory=False):
        loss = (saved * saved).sum()
    before = saved.detach().clone()
    saved.data.zero_()
    (grad,) = torch.autograd.grad(loss, [hidden])
    torch.testing.assert_close(grad, 2 * before)


def test_parameters_stay():
    weight = nn.Parameter(torch.randn(300, 300))
    with OffloadToHost(pin_memory=False):
        out = weight * weight
    assert cast(Any, out.grad_fn)._saved_self.data_ptr() == weight.data_ptr()
