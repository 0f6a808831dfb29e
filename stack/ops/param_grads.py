"""Parameter gradients of work done in tiles: summed in fp32, handed out once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ParamGrads:
    """Sums the gradients of `params` over several backward passes.

    In bf16, adding up tiles in the parameter's own type would round at every tile. A single tile is not copied.
    """

    def __init__(self, params: Sequence[Tensor]):
        self.params = params
        self._sums: list[Tensor | None] = [None] * len(params)
        self._tiles = 0

    def backward(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients of `inputs`; those of the parameters are added to the sums. An input without part in it gets 0."""
        found = torch.autograd.grad(outputs, [*inputs, *self.params], grads, allow_unused=True)
        for index, grad in enumerate(found[len(inputs) :]):
            total = self._sums[index]
            if grad is None:
                continue
            if total is None:
                self._sums[index] = grad
            elif total.dtype == torch.float32:
                total += grad
            else:
                self._sums[index] = total.float().add_(grad)
        return tuple(
            torch.zeros_like(value) if grad is None else grad
            for grad, value in zip(found[: len(inputs)], inputs, strict=True)
        )

    def totals(self) -> list[Tensor | None]:
        """In each parameter's own type; None for one that took no part."""
        return [
            None if total is None else total.to(param.dtype)
            for total, param in zip(self._sums, self.params, strict=True)
        ]
