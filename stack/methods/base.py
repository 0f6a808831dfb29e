"""The interface of a method. A method gives sums over targets, never means: the step divides once, over all
ranks."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float
from torch import Tensor, nn

from stack.data.batch import MicroBatch


class Method(Protocol):
    """What is learned from a batch."""

    def count_targets(self, batch: MicroBatch) -> int:
        """Targets of a batch: what its loss is summed over. Counts of a batch's slices add up to that of the
        whole."""
        ...

    def loss(self, model: nn.Module, batch: MicroBatch, scale: float) -> Float[Tensor, ""]:
        """scale x the sum of the losses of this rank's targets, in nats.

        batch: this rank's slice. The scale goes in before the loss is computed, since a tiled loss makes the
        head's gradient in its forward. Without a target the result is 0 and still has a gradient, so that all
        ranks run the same collectives in backward.
        """
        ...
