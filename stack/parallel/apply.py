"""The one ordered list of changes to a plain model."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import PreTrainedModel

from stack.config.schema import MemoryConfig
from stack.dist.topology import Topology
from stack.models import spec
from stack.parallel.checkpointing import checkpoint_blocks
from stack.parallel.lean import install_lean, lean_obstacle
from stack.parallel.tiling import install_head_loss, tile_mlps
from stack.parallel.ulysses import AttentionSettings, install_attention


def apply_parallelism(
    model: nn.Module,
    model_spec: spec.ModelSpec,
    memory: MemoryConfig,
    attention: str,
    stage: int,
    topology: Topology,
) -> list[str]:
    """Change `model` in place, as an instance, before the engine wraps it. Returns remarks for the start-up summary.

    The order: attention first, since the config it edits is read by everything; then the blocks, as lean layers or with
    the generic levers: their tiled parts before the checkpointing around them, since a checkpointed block has to run the
    tiled parts when it runs again; the head last, as it stands outside the blocks.
    """
    blocks, attentions = spec.blocks(model), spec.attentions(model)
    obstacle = lean_obstacle(blocks, model_spec.family, model.config) if memory.lean else None
    lean = memory.lean and obstacle is None
    settings = AttentionSettings(attention, topology.sp, topology.sp_rank, topology.sp_group, lean)
    install_attention(attentions, model.config, settings)
    if lean:
        install_lean(blocks, attentions, settings, model_spec.family, memory, stage)
    else:
        if memory.tiled_mlp:
            tile_mlps(spec.mlps(model), memory.mlp_tile, stage)
        if memory.checkpointing == "full":
            checkpoint_blocks(blocks, memory.offload, memory.pin_memory)
    install_head_loss(
        spec.head(model),
        memory.loss_tile if memory.tiled_loss else None,
        model_spec.logit_scale,
        model_spec.softcap or 0.0,
    )
    _let_gradients_reach_all_blocks(model)
    return [f"not a lean layer, the generic levers serve: {obstacle}"] if obstacle else []


def _let_gradients_reach_all_blocks(model: nn.Module) -> None:
    """With frozen embeddings the first hidden state needs no gradient, and hooks that wait for one never fire: ZeRO-3
    would reduce a leaf block before its gradients exist."""
    embeddings = cast(PreTrainedModel, model).get_input_embeddings()
    if not any(param.requires_grad for param in embeddings.parameters()):
        embeddings.register_forward_hook(lambda module, args, output: output.detach().requires_grad_())
