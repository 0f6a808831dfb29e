"""FLOPs of a batch, by convention: what MFU and HFU divide by the device's peak.

One multiply-add is 2 FLOPs. Only matrix products count: projections, MLPs, attention scores and values, head; not
norms, activations, rotary embedding or the embedding look-up (under 1 % together from 0.6 B parameters on).

- Causal attention counts the half of the score matrix that is needed: length^2 / 2 pairs a document, so packed documents
  cost what they cost alone. Kernels that compute masked blocks do more; that is not credited.
- In a mixture of experts a token meets its chosen experts and the router, not all experts.
- model FLOPs = 3 x forward: backward is two products for each of forward. Frozen parameters make this too high.
- hardware FLOPs = model FLOPs + what the memory levers recompute. Attention kernels recompute scores in backward; by
  the usual convention (PaLM, appendix B) that is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the forecast counts FLOPs without torch, for sizes that have the same names
    from stack.models.spec import ModelSpec


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs by part, of all layers and tokens together."""

    projections: int
    """Query, key, value and output projections."""
    attention: int
    """Scores and weighted values."""
    mlp: int
    head: int

    @property
    def layers(self) -> int:
        """All but the head."""
        return self.projections + self.attention + self.mlp

    @property
    def total(self) -> int:
        return self.layers + self.head


def forward_flops(spec: ModelSpec, document_lengths: Sequence[int]) -> Flops:
    """FLOPs of one forward over documents of these lengths (tokens)."""
    num_tokens = sum(document_lengths)
    # Counted first: a row of a million tokens may have as many documents, and most layers have the same window.
    layers, documents = Counter(spec.windows), Counter(document_lengths)
    pairs = sum(
        layers[window] * documents[length] * _pairs(length, window)
        for window in layers
        for length in documents
    )
    return Flops(
        projections=2 * num_tokens * spec.attention_weights,
        attention=round(4 * spec.num_heads * spec.head_dim * pairs),
        mlp=2 * num_tokens * spec.mlp_weights,
        head=2 * num_tokens * spec.head_weights,
    )


def model_flops(spec: ModelSpec, document_lengths: Sequence[int]) -> int:
    """FLOPs that forward and backward need, whatever the implementation: the numerator of MFU."""
    return 3 * forward_flops(spec, document_lengths).total


def hardware_flops(
    spec: ModelSpec,
    document_lengths: Sequence[int],
    *,
    checkpointing: bool,
    tiled_mlp: bool,
    lean: bool = False,
) -> int:
    """FLOPs that are executed: the numerator of HFU.

    checkpointing: each layer's forward runs twice. tiled_mlp: each MLP's forward runs twice; with checkpointing, too,
    it is twice and not three times, since the layer's recomputation stops before the MLP (see ops/tiled_mlp.py). The
    tiled loss recomputes nothing: a tile's logits become gradients at once (see ops/tiled_loss.py). lean: MLP and output
    projection run forward twice, q, k and v three times, attention once (see parallel/lean.py).
    """
    forward = forward_flops(spec, document_lengths)
    if lean:
        out = 2 * sum(document_lengths) * spec.num_layers * spec.num_heads * spec.head_dim * spec.hidden
        return 3 * forward.total + forward.mlp + 2 * forward.projections - out
    again = forward.layers if checkpointing else forward.mlp if tiled_mlp else 0
    return 3 * forward.total + again


def _pairs(length: int, window: int | None) -> float:
    """Query-key pairs of one document: half its square, or the band that a sliding window leaves of it."""
    if window is None or window >= length:
        return length**2 / 2
    return window * length - window**2 / 2
