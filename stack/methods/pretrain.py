"""Next-token prediction: every token is predicted from those before it in its document."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from stack.config.schema import MethodConfig
from stack.data.batch import MicroBatch
from stack.models.spec import body, head


class Pretrain:
    """`method=pretrain`"""

    def __init__(self, config: MethodConfig):
        self.label_smoothing = config.label_smoothing
        self.z_loss = config.z_loss

    def count_targets(self, batch: MicroBatch) -> int:
        return batch.num_targets

    def loss(self, model: nn.Module, batch: MicroBatch, scale: float) -> Float[Tensor, ""]:
        hidden = body(
            model
        )(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,  # documents are kept apart by their boundaries; a mask would grow with the square
            use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens,
            cu_seq_lens_k=batch.cu_seqlens,
        ).last_hidden_state  # [rows, seq_local, hidden]
        return head(model)(
            hidden, labels=batch.labels, scale=scale, label_smoothing=self.label_smoothing, z_loss=self.z_loss
        )
