"""Tiled MLP and tiled loss on a model's own modules, changed as instances."""

from __future__ import annotations

from typing import Any, cast

from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from stack.errors import ModelError
from stack.ops import reference
from stack.ops.tiled_loss import tiled_token_loss_sum
from stack.ops.tiled_mlp import tiled_block
from stack.ops.token_loss import LossOptions


def tile_mlps(mlps: list[nn.Module], tile: int, stage: int) -> None:
    """Run each MLP or expert block `tile` tokens at a time.

    Under ZeRO-3 a block becomes a leaf: its parameters are gathered once before the first tile and released after the
    last. Gathering per tile would repeat the traffic, and hang where ranks have different numbers of tiles.

    Raises ModelError under ZeRO-3 for a model that applies one block several times in a forward: a leaf hands over its
    gradients each time it is done, which is too early all but the last time.
    """
    different = list(dict.fromkeys(mlps))
    for mlp in different:
        if stage == 3 and mlps.count(mlp) > 1:
            raise ModelError(
                f"{type(mlp).__name__} is shared by several layers. Fix: memory.tiled_mlp=false or engine.stage=2"
            )
        if stage == 3:
            set_z3_leaf_module(mlp, True)
        mlp.forward = _tiled(mlp, tile)


def tile_final_norm(norm: nn.Module, tile: int) -> None:
    """Run the norm before the head `tile` tokens at a time. Whole, it would keep copies of the slice in fp32 through the
    loss, and make more in backward: 10 GiB for Qwen3-8B at 131,072 local tokens."""
    norm.forward = _tiled(norm, tile)


def _tiled(mlp: nn.Module, tile: int) -> Any:
    plain = mlp.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            raise ModelError(
                f"{type(mlp).__name__} takes more than hidden states. Fix: memory.tiled_mlp=false"
            )
        params = [param for param in mlp.parameters() if param.requires_grad]
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        return tiled_block(flat, plain, params, tile).view(hidden.shape)

    return forward


def install_head_loss(head: nn.Module, tile: int | None, logit_scale: float, softcap: float) -> None:
    """Give the head a second signature: with `labels` it returns the loss, so the logits need not leave it.

    The loss belongs inside the head's own forward, and that inside the forward which the engine calls: outside it,
    ZeRO-3 gathers the head again and again (249 GiB a step in place of 4.3 at 1M tokens).

    tile: tokens a tile, or None for the untiled reference. logit_scale, softcap: what the model does to its logits.
    New signature: head(hidden [rows, seq_local, hidden], labels [rows, seq_local] or None, scale, label_smoothing,
    z_loss) -> scale * sum of token losses as an fp32 scalar, or the logits where labels is None.
    """
    plain = head.forward

    def forward(
        hidden: Tensor,
        labels: Tensor | None = None,
        scale: float = 1.0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        if labels is None:
            return plain(hidden)
        options = LossOptions(logit_scale, softcap, label_smoothing, z_loss)
        flat, flat_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        weight, bias = cast(nn.Linear, head).weight, getattr(head, "bias", None)
        if tile is None:
            return scale * reference.token_loss_sum(flat, weight, bias, flat_labels, options)
        return scale * tiled_token_loss_sum(flat, weight, bias, flat_labels, tile, options)

    head.forward = forward
