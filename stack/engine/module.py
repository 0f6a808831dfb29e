"""The module that the engine wraps: model and loss in one forward."""

from __future__ import annotations

from torch import Tensor, nn

from stack.data.batch import MicroBatch
from stack.methods.base import Method


class StepModule(nn.Module):
    """Calls the method inside the forward that the engine sees, so that ZeRO-3 traces the head with the rest."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, method: Method, batch: MicroBatch, scale: float) -> Tensor:
        return method.loss(self.model, batch, scale)
