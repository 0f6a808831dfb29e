"""What the loss of one token is: cross-entropy with the options that models and methods ask for."""

from __future__ import annotations

from dataclasses import dataclass

IGNORE = -100
"""Label of a position without a target, as in torch's cross_entropy."""


@dataclass(frozen=True)
class LossOptions:
    """How logits are shaped and what is added to the cross-entropy of a token.

    logit_scale: factor on the logits (Granite, Cohere). softcap: c in c * tanh(logits / c) (Gemma 2), 0 is off.
    label_smoothing: share of the target spread over all words. z_loss: weight of log(Z)^2.
    """

    logit_scale: float = 1.0
    softcap: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
