"""The tensors of one forward: rows of packed documents."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Int
from torch import Tensor

from stack.ops.token_loss import IGNORE


@dataclass
class MicroBatch:
    """One rank's slice of rows of packed documents; without sequence parallelism, and in tests, whole rows.

    A document that is longer than what is left of its row goes on in the next row as a new piece: its
    positions restart at 0 and it does not see the earlier piece, but the last position of the earlier piece
    has its first token as target. So each token that follows another one in its document is a target exactly
    once, wherever rows are cut.
    """

    input_ids: Int[Tensor, "rows seq"]
    labels: Int[Tensor, "rows seq"]
    """Shifted already: labels[r, i] is the token that follows input_ids[r, i] in its document, IGNORE if
    there is none."""

    position_ids: Int[Tensor, "rows seq"]
    """Restart at 0 in each piece of a document."""

    cu_seqlens: Int[Tensor, " bounds"]
    """Boundaries of the pieces, int32, over the flattened tokens of the whole rows, from 0 to rows x the length of a
    whole row, which all ranks' slices make up. Row ends are boundaries; padding is a piece of its own."""

    row_tokens: tuple[int, ...] = ()
    """Tokens of documents in each whole row, which padding follows; 0 for a row that only fills up the
    batch."""

    @property
    def num_targets(self) -> int:
        """Positions of the slice that have a target."""
        return int((self.labels != IGNORE).sum())

    def pinned(self, device: torch.device) -> MicroBatch:
        """The same in page-locked memory, from which copies to this CUDA device run beside the steps. torch keeps the
        buffers and hands them out again once a copy is through."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        with torch.cuda.device(device):  # a thread's own, else each would wake the first device
            return replace(
                self,
                **{name: each.pin_memory() for name, each in tensors.items() if isinstance(each, Tensor)},
            )
