"""The one ordered list of changes to a plain model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from stack.config.schema import MemoryConfig
from stack.dist.topology import Topology
from stack.models import spec
from stack.parallel.checkpointing import checkpoint_blocks
from stack.parallel.fused import install_fused, rms_norms
from stack.parallel.kernels import attention_remarks
from stack.parallel.lean import install_lean, lean_obstacle
from stack.parallel.tiling import install_head_loss, tile_final_norm, tile_mlps
from stack.parallel.ulysses import AttentionSettings, install_attention


@dataclass(frozen=True)
class Applied:
    """What was done. lean: the blocks run as lean layers. remarks: for the start-up summary."""

    lean: bool
    remarks: list[str]


def apply_parallelism(
    model: nn.Module,
    model_spec: spec.ModelSpec,
    memory: MemoryConfig,
    attention: str,
    stage: int,
    topology: Topology,
) -> Applied:
    """Change `model` in place, as an instance, before the engine wraps it.

    The order: attention first, since the config it edits is read by everything; then fused kernels, which all around them
    have to call; then the blocks, as lean layers or with the generic levers: their tiled parts before the checkpointing
    around them, since a checkpointed block has to run the tiled parts when it runs again; the final norm and the head last,
    as they stand outside the blocks.
    """
    blocks, attentions = spec.blocks(model), spec.attentions(model)
    obstacle = lean_obstacle(blocks, model_spec.family, model.config) if memory.lean else None
    lean = memory.lean and obstacle is None
    settings = AttentionSettings(attention, topology.sp, topology.sp_rank, topology.sp_group, lean)
    install_attention(attentions, model.config, settings)
    mlps = spec.mlps(model)
    remarks = install_fused(rms_norms(model), mlps, attentions, memory.fused_kernels, topology.device)
    if lean:
        install_lean(blocks, attentions, settings, model_spec.family, memory, stage)
        dtype = next(model.parameters()).dtype
        remarks += attention_remarks(attention, topology.device, dtype, model_spec.head_dim)
    else:
        if memory.tiled_mlp:
            tile_mlps(mlps, memory.mlp_tile, stage)
        if memory.checkpointing == "full":
            checkpoint_blocks(blocks, memory.offload, memory.pin_memory)
    final_norm = spec.final_norm(model)
    if (lean or memory.tiled_mlp) and final_norm is not None:
        tile_final_norm(final_norm, memory.mlp_tile)
    install_head_loss(
        spec.head(model),
        memory.loss_tile if memory.tiled_loss else None,
        model_spec.logit_scale,
        model_spec.softcap or 0.0,
    )
    _let_gradients_reach_all_blocks(model)
    if obstacle:
        remarks.append(f"not a lean layer, the generic levers serve: {obstacle}")
    return Applied(lean, remarks)


def _let_gradients_reach_all_blocks(model: nn.Module) -> None:
    """With frozen embeddings the first hidden state needs no gradient, and hooks that wait for one never fire: ZeRO-3
    would reduce a leaf block before its gradients exist."""
    embeddings = cast(PreTrainedModel, model).get_input_embeddings()
    if not any(param.requires_grad for param in embeddings.parameters()):
        embeddings.register_forward_hook(lambda module, args, output: output.detach().requires_grad_())
