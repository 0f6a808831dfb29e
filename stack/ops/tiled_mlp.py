"""A token-wise block (MLP, experts) in tiles of tokens: its wide intermediates exist for one tile at a time.

Forward keeps only the block's input. Backward recomputes a tile, takes its gradients, and goes on to the next; parameter
gradients are summed over the tiles in fp32 and handed to autograd once. So ZeRO hooks fire once, ranks with different
numbers of tokens stay in step, and the tile count does not show in the result beyond rounding.

Inside activation checkpointing the recomputed forward would run the block once for nothing: its output is not needed
where the layer ends with a residual add. Therefore the input is saved by a separate identity node before the block;
torch's checkpointing stops a recomputation as soon as the last saved tensor is there, which is then before the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stack.ops.param_grads import ParamGrads

Block = Callable[[Tensor], Tensor]


class _SaveInput(torch.autograd.Function):
    """Identity that keeps its input; `_TiledBlock` reads it from this node in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _TiledBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, block: Block, tile: int, input_node: Any, *params: Tensor
    ) -> Tensor:
        ctx.block, ctx.tile, ctx.input_node, ctx.params = block, tile, input_node, params
        ctx.rng_state = _rng_state(hidden.device)
        return _forward_tiles(hidden, block, tile)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.input_node.saved_tensors
        sums = ParamGrads(ctx.params)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        with torch.random.fork_rng(devices=_rng_devices(hidden.device)), torch.enable_grad():
            # Replaying the tiles in forward's order from forward's state gives each the dropout it had.
            _set_rng_state(hidden.device, ctx.rng_state)
            for start in range(0, hidden.shape[1], ctx.tile):
                part = slice(start, start + ctx.tile)
                tile_input = hidden[:, part].detach().requires_grad_()
                (found,) = sums.backward([ctx.block(tile_input)], [tile_input], [grads[0][:, part]])
                if grad_hidden is not None:
                    grad_hidden[:, part] = found
        return grad_hidden, None, None, None, *sums.totals()


def _forward_tiles(hidden: Tensor, block: Block, tile: int) -> Tensor:
    output = torch.empty_like(hidden)
    for start in range(0, hidden.shape[1], tile):
        part = slice(start, start + tile)
        output[:, part] = block(hidden[:, part])
    return output


def _rng_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_rng_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def tiled_block(hidden: Tensor, block: Block, params: Sequence[Tensor], tile: int) -> Tensor:
    """`block(hidden)`, `tile` tokens at a time.

    hidden: [rows, tokens, hidden]. block: works on each token by itself and keeps the shape. params: the block's
    parameters that need a gradient. Tiles may be uneven, and no token at all is fine.
    """
    if tile < 1:
        raise ValueError(f"tile={tile}: expected at least 1 token")
    if not torch.is_grad_enabled() or not (hidden.requires_grad or params):
        return _forward_tiles(hidden, block, tile)
    hidden = _SaveInput.apply(hidden if hidden.requires_grad else hidden.detach().requires_grad_())
    return _TiledBlock.apply(hidden, block, tile, hidden.grad_fn, *params)
