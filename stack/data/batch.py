"""The tensors of one forward: rows of packed documents."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from stack.ops.token_loss import IGNORE


@dataclass
class MicroBatch:
    """Rows of packed documents on the CPU. Whole rows have `seq` tokens, a rank's slice of them `seq_local`.

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
    """Boundaries of the pieces, int32, over the flattened rows x seq tokens of the whole rows, from 0 to rows
    x seq. Row ends are boundaries; padding is a piece of its own."""

    row_tokens: tuple[int, ...] = ()
    """Tokens of documents in each whole row, which padding follows; 0 for a row that only fills up the
    batch."""

    @property
    def num_targets(self) -> int:
        """Positions that have a target."""
        return int((self.labels != IGNORE).sum())
