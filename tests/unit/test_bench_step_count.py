"""The count of a step: gradients that torch writes into fresh zeros take one tensor, as on a device nobody watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import stack.bench.step_count as step_count
from stack.bench.step_count import Counted

ROWS, COLUMNS, CHOSEN = 512, 256, 8
ZEROS = 4 * ROWS * COLUMNS
"""Bytes of the gradient."""


def gathered(values: Tensor) -> Tensor:
    places = torch.arange(ROWS * CHOSEN).view(ROWS, CHOSEN) % COLUMNS
    return values.gather(1, places)


def chosen(values: Tensor) -> Tensor:
    return values.topk(CHOSEN, dim=-1).values


def indexed(values: Tensor) -> Tensor:
    return values[torch.arange(ROWS).flip(0) // 2]  # rows twice, so that sums are taken


OPERATORS = {"gather": gathered, "topk": chosen, "index": indexed}


def gradient(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(leaf, output, the output's gradient)"""
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = run(values)
    return values, output, torch.arange(output.numel(), dtype=torch.float32).view(output.shape)


def most_of_backward(run: Callable[[Tensor], Tensor]) -> tuple[int, Tensor]:
    """(bytes at the most that backward makes, the gradient)"""
    values, output, grad = gradient(run)
    with Counted(torch.device("cpu")) as live:
        live.restart("backward")
        (found,) = torch.autograd.grad(output, values, grad)
    return live.phases["backward"].num_bytes, found


@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_in_fresh_zeros_is_one_tensor_and_right(name: str) -> None:
    values, output, grad = gradient(OPERATORS[name])
    (expected,) = torch.autograd.grad(output, values, grad)
    num_bytes, found = most_of_backward(OPERATORS[name])
    assert torch.equal(found, expected) and expected.count_nonzero() > ROWS
    assert ZEROS <= num_bytes < 1.1 * ZEROS


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_would_copy_it_under_a_dispatch_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once torch does not, `WRITTEN_IN_PLACE` can go."""
    monkeypatch.setattr(step_count, "WRITTEN_IN_PLACE", {})
    assert most_of_backward(OPERATORS[name])[0] >= 2 * ZEROS


class _ScattersInBackward(torch.autograd.Function):
    """A backward of somebody else's that adds to a tensor which is not fresh."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.base = torch.ones_like(values)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        places = torch.zeros(ROWS, 1, dtype=torch.long)
        return ctx.base.scatter_add(1, places, grads[0][:, :1])


def test_nothing_else_is_written_in_place() -> None:
    values = torch.zeros(ROWS, COLUMNS, requires_grad=True)
    with Counted(torch.device("cpu")):
        added = values.detach().scatter_add(1, torch.zeros(ROWS, 1, dtype=torch.long), torch.ones(ROWS, 1))
        put = values.detach().index_put((torch.tensor([0]),), torch.ones(COLUMNS))
        output = _ScattersInBackward.apply(values)
        base = output.grad_fn.base
        (grad,) = torch.autograd.grad(output, values, torch.ones(ROWS, COLUMNS))
    assert not values.any() and added[:, 0].all() and put[0].all()
    assert base.eq(1).all() and grad[:, 0].eq(2).all() and grad[:, 1:].eq(1).all()
