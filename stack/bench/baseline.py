"""The same training step from DeepSpeed's and transformers' own pieces alone, put together as those projects say, with the
settings that Arctic Long Sequence Training publishes (Bekman et al. 2025, arXiv 2506.13996, and DeepSpeed's tutorial):

- `UlyssesSPAttentionHF` in front of transformers' attention, its groups handed to `deepspeed.initialize` as `mpu`;
- `TiledMLP` with ceil(local length / hidden size) tiles;
- `TiledFusedLogitsLoss` in tiles of at most 1 GiB of fp32 logits;
- transformers' activation checkpointing of each layer, its saved tensors on the host;
- ZeRO-3 with the same settings, optimizer and starting weights as the presets.

Where the published way would lose by an accident, the better way is taken, so that the comparison is with the best that
these pieces give: the loss stands inside the forward that the engine calls (outside, ZeRO-3 gathers the head for each
tile); its scale is applied within the tile (afterwards, the head's gradient stays unscaled); tile counts are ones that
torch.chunk can make; the loss tile is never larger than the presets' `memory.loss_tile`, since 1 GiB of a small vocabulary
would be the whole sequence; ranks do not agree on the number of tiles before each MLP, as their lengths are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    TiledFusedLogitsLoss,
    TiledMLP,
    UlyssesSPAttentionHF,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stack.bench.contender import plain_model
from stack.config.schema import RunConfig
from stack.data.batch import MicroBatch
from stack.dist.topology import Topology
from stack.engine.build import make_optimizer
from stack.errors import ModelError
from stack.models import spec

LOGITS_BYTES = 1 << 30
"""Largest tile of the loss in fp32 logits, by ALST's recipe."""


class Baseline:
    """Contender; see the top of this file."""

    def __init__(self, cfg: RunConfig, topology: Topology):
        self.built, ds_config = plain_model(cfg, topology)
        model, sp = self.built.model, cfg.parallel.sp
        if self.built.spec.softcap or self.built.spec.logit_scale != 1.0:
            raise ModelError(
                f"the baseline cannot reshape the logits of {type(model).__name__}. Fix: another model"
            )
        if model.config._attn_implementation != cfg.model.attention:
            model.set_attn_implementation(cfg.model.attention)
        # Registered under the name of the attention it wraps, for every model of the process: hence ranks of its own.
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=cfg.model.attention,
            sequence_parallel_size=sp,
            micro_batch_size=cfg.data.micro_batch,
            seq_length_is_variable=True,
        )
        for mlp in spec.mlps(model):
            mlp.forward = partial(_tiled_mlp, mlp, type(mlp).forward)
        _checkpoint_on_host(model, topology.device)
        self.world, self.device = topology.world, topology.device
        module = _ModelWithLoss(model, cfg.memory.loss_tile)
        optimizer = make_optimizer(model, cfg.optim, ds_config)
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=ds_config, mpu=mpu, dist_init_required=False
        )
        self.engine.train()

    @property
    def model(self) -> nn.Module:
        return self.built.model

    def passes(self, batch: MicroBatch, num_targets: int) -> float:
        ids, positions, labels = (
            part.to(self.device) for part in (batch.input_ids, batch.position_ids, batch.labels)
        )
        # ZeRO-3 averages gradients over all ranks, so a rank's sum is divided by its share of the targets.
        share = num_targets / self.world
        loss = self.engine(ids, positions, labels, share)
        self.engine.backward(loss)
        return loss.item() * share

    def update(self, lr: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def close(self) -> None:
        self.engine.destroy()


class _ModelWithLoss(nn.Module):
    """Model and tiled loss in one forward."""

    def __init__(self, model: PreTrainedModel, loss_tile: int):
        super().__init__()
        self.model, self.loss_tile = model, loss_tile

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor, share: float) -> Tensor:
        """Token losses of this rank, summed and divided by `share`; a scalar."""
        hidden = spec.body(self.model)(
            input_ids=ids, position_ids=positions, use_cache=False
        ).last_hidden_state
        head = spec.head(self.model)
        vocab, tokens = self.model.config.vocab_size, labels.numel()
        tiles = max(math.ceil(4 * tokens * vocab / LOGITS_BYTES), math.ceil(tokens / self.loss_tile))

        def tile_loss(model: PreTrainedModel, part: Tensor, part_labels: Tensor) -> Tensor:
            return model.loss_function(
                logits=head(part),
                labels=None,
                vocab_size=vocab,
                num_items_in_batch=share,
                shift_labels=part_labels,
            )

        return TiledFusedLogitsLoss.apply(
            tile_loss, self.model, hidden, labels, None, possible_tiles(tokens, tiles), [head.weight], "sum"
        )


def _tiled_mlp(mlp: nn.Module, plain: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    tokens, width = hidden.shape[-2:]
    tiles = possible_tiles(tokens, math.ceil(tokens / width))
    return TiledMLP.apply(plain, mlp, hidden, tiles, list(mlp.parameters()))


def possible_tiles(tokens: int, tiles: int) -> int:
    """The nearest number of tiles, at most `tiles`, that torch.chunk makes of `tokens`: with another one DeepSpeed's
    loops leave gradients behind."""
    return math.ceil(tokens / math.ceil(tokens / min(tiles, tokens)))


def _checkpoint_on_host(model: PreTrainedModel, device: torch.device) -> None:
    """transformers' own switch where it works. On a machine without an accelerator it asks for pinned memory all the same
    and fails, so its function is put in by hand: `save_on_cpu` then makes plain copies, which can be told from what
    stays on the device."""
    options = {"use_reentrant": False}
    if device.type == "cuda":
        model.activation_checkpointing_enable(options, offload=True)
        return
    model.activation_checkpointing_enable(options)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            setattr(module, "_gradient_checkpointing_func", _checkpoint)  # noqa: B010  not a field of nn.Module


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    with save_on_cpu(pin_memory=True):
        return checkpoint(function, *args, use_reentrant=False)
