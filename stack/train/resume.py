"""Going on from a checkpoint: found and judged before anything is built, put back once the engine stands."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stack.checkpoint.differences import is_forced
from stack.checkpoint.export_hf import AUXILIARY
from stack.checkpoint.find import Checkpoint, find_checkpoint
from stack.checkpoint.load import (
    check_layout,
    check_settings,
    load_checkpoint,
    set_aside_newer,
    way_of,
)
from stack.checkpoint.state import TrainState
from stack.config import derive
from stack.config.convert import convert
from stack.config.schema import RunConfig
from stack.data.loader import Loader
from stack.dist.topology import Topology
from stack.engine.schedule import lr_factor
from stack.errors import CheckpointError
from stack.plan.settings import DEEPSPEED
from stack.train.console import tell
from stack.train.folder import RunFolder

if TYPE_CHECKING:
    from stack.engine.handle import Engine


def make_layout(cfg: RunConfig, ds_config: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """What the files of a checkpoint depend on, and the rows of a step. ds_config: the final DeepSpeed settings."""
    zero = ds_config["zero_optimization"]
    return {
        "world": topology.world,
        "sp": topology.sp,
        "stage": cfg.engine.stage,
        "precision": cfg.engine.precision,
        "optimizer": cfg.optim.name,
        "cpu_optimizer": cfg.engine.cpu_optimizer,
        "states_on": topology.device.type if cfg.engine.offload_optimizer == "none" else "host",
        "nvme": cfg.engine.offload_optimizer == "nvme",
        # Elements of the vectors that ZeRO-3 makes of its shards; DeepSpeed's default where nothing is said.
        "sub_group": zero.get("sub_group_size", DEEPSPEED["sub_group_size"]) if zero["stage"] == 3 else None,
        "rows_per_step": derive.rows_per_step(cfg, topology.world),
        "accumulation": cfg.engine.accumulation,
    }


def look_for_checkpoint(
    cfg: RunConfig, folder: RunFolder, layout: dict[str, Any], topology: Topology
) -> Checkpoint | None:
    """Collective. The checkpoint to go on from, or None; refused here, before anything is built, if it cannot fit."""

    def judge(found: Checkpoint) -> None:
        check_settings(found, asdict(cfg), cfg.checkpoint.force)
        check_layout(found, layout, cfg.checkpoint.force)

    found = find_checkpoint(folder.checkpoints, cfg.checkpoint.resume, cfg.name, topology, tell, judge)
    if found is not None and topology.is_main:
        changed = check_settings(found, asdict(cfg), cfg.checkpoint.force)
        if changed:
            lines = "".join(f"\n  - {each}" for each in changed)
            tell(f"settings that differ from those of {found.path.name}:{lines}")
    return found


def resume(
    cfg: RunConfig,
    checkpoint: Checkpoint,
    layout: dict[str, Any],
    total_steps: int,
    engine: Engine,
    loader: Loader,
    folder: RunFolder,
    topology: Topology,
) -> TrainState:
    """Everything back to where the checkpoint was."""
    check_layout(checkpoint, layout, cfg.checkpoint.force)
    other_rows = any(is_forced(f"data.{name}", cfg.checkpoint.force) for name in asdict(cfg.data))
    way = way_of(checkpoint, layout, other_rows or is_forced("seed", cfg.checkpoint.force))
    if not way.as_saved and topology.is_main:
        before = checkpoint.manifest.layout
        tell(
            f"reading {checkpoint.path.name} parameter by parameter: saved {_shape(before, layout)}, "
            f"now {_shape(layout, before)}"
        )
    start = time.monotonic()
    state = load_checkpoint(checkpoint, engine, loader, topology, way)
    check_tokenizer(checkpoint, state.loader.get("tokenizer"), loader.tokenizer_hash, cfg.checkpoint.force)
    if topology.is_main:
        size = sum(checkpoint.manifest.files.values())
        tell(
            f"resuming from step {state.step}: {checkpoint.path} ({size / 1e9:.3f} GB in {time.monotonic() - start:.1f} s)"
        )
        if not way.with_states:
            tell("the optimizer starts anew: its states were saved by another one")
        if state.loader | {"tokenizer": loader.tokenizer_hash} != loader.state():
            tell("the data is not what it was: it is read from its first row on")
        _tell_lr(cfg, checkpoint, state.step, total_steps)
        if state.step >= total_steps:
            tell(
                f"all {total_steps} steps are done already: raise schedule.steps or schedule.epochs to go on"
            )
        _set_aside(folder, checkpoint)
    topology.barrier()
    return state


def check_tokenizer(checkpoint: Checkpoint, saved: str | None, now: str | None, force: Sequence[str]) -> None:
    """Raises CheckpointError where other text has made another tokenizer, and so given other ids to the saved weights.

    saved, now: hashes of the tokenizers, None where none is known.
    """
    if None in (saved, now) or saved == now:
        return
    # The section `data` alone is too easily given for other text.
    if is_forced("model.tokenizer", force) or "data.train_tokenizer" in force:
        return
    kept = checkpoint.path.parent.parent / AUXILIARY
    names = ",".join(dict.fromkeys([*force, "data.train_tokenizer", "model.tokenizer"]))
    keep = f"data.train_tokenizer=false model.tokenizer={kept} checkpoint.force=[{names}]"
    taken = ",".join(dict.fromkeys([*force, "model.tokenizer"]))
    raise CheckpointError(
        f"{checkpoint.path} was trained on the ids of another tokenizer (saved {saved:.12}, now {now:.12}): its weights would "
        "stand for other pieces of text; a tokenizer that data.train_tokenizer makes changes with the text. Fix: keep the "
        f"saved one: {keep}; or take the new one all the same: checkpoint.force=[{taken}]"
    )


def _set_aside(folder: RunFolder, checkpoint: Checkpoint) -> None:
    try:
        set_aside_newer(folder.checkpoints, checkpoint, tell)
    except OSError as error:
        raise CheckpointError(
            f"checkpoints that are newer than {checkpoint.path.name} could not be renamed, and the next restart would take "
            f"them up: {error}. Fix: let {folder.checkpoints} be writable, or begin a new run from these weights: "
            f"name=NEW_NAME checkpoint.weights_from={checkpoint.path}"
        ) from error


def _shape(layout: dict[str, Any], other: dict[str, Any]) -> str:
    world, sp = layout["world"], layout.get("sp", 1)
    place = "an NVMe disk" if layout.get("nvme") else layout.get("states_on", "the same device")
    size = layout.get("sub_group")
    groups = f" in groups of {size:,}" if size and other.get("sub_group") not in (size, None) else ""
    return f"on {world} rank(s), SP {sp}, ZeRO-{layout['stage']}, {layout.get('precision')}, states on {place}{groups}"


def _tell_lr(cfg: RunConfig, checkpoint: Checkpoint, step: int, total_steps: int) -> None:
    """What a changed length or schedule does to the learning rate of the next step, and of the last."""
    planned, settings = checkpoint.manifest.steps_planned, checkpoint.manifest.settings
    if planned != total_steps:
        tell(f"the run was planned for {planned} steps and is for {total_steps} now")
    if not settings:
        return
    before, _ = convert(settings)
    old, new = lr_factor(before.schedule, planned), lr_factor(cfg.schedule, total_steps)
    was, now = before.optim.lr * old(step), cfg.optim.lr * new(step)
    changed = planned != total_steps or before.schedule != cfg.schedule or before.optim.lr != cfg.optim.lr
    if step < total_steps and (changed or not math.isclose(was, now)):
        tell(
            f"learning rate: step {step + 1} was to be taken with {was:.4g} and is taken with {now:.4g}; from there it "
            f"follows schedule.name={cfg.schedule.name} over {total_steps} steps, to {cfg.optim.lr * new(total_steps - 1):.4g}"
        )
