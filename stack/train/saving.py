"""The saver of a run, from its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stack.checkpoint.publish import Origin
from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState
from stack.config.convert import as_dict
from stack.config.schema import RunConfig
from stack.dist.topology import Topology
from stack.train.console import tell
from stack.train.folder import RunFolder


def make_saver(
    cfg: RunConfig,
    folder: RunFolder,
    layout: dict[str, Any],
    state: TrainState,
    total_steps: int,
    topology: Topology,
) -> Saver:
    """layout: see `Manifest.layout`. What a start that was cut short left behind is put in order."""
    origin = Origin(
        run=cfg.name,
        layout=layout,
        steps_planned=total_steps,
        settings=as_dict(cfg),
        wandb_run_id=lambda: wandb_run_id(folder.path),
    )
    saver = Saver(folder.checkpoints, topology, origin, cfg.checkpoint, tell)
    # A step whose record is pending is saved again: its checkpoint must not be replaced while it is copied elsewhere.
    if topology.is_main and not state.pending_record:
        try:
            saver.prepare()
        except OSError as error:
            tell(f"warning: left-overs in {folder.checkpoints} could not be removed: {error}")
    return saver


def wandb_run_id(folder: Path) -> str | None:
    """The id under which W&B knows the run in `folder`, as `WandbMemory` notes it; None without W&B."""
    try:
        return json.loads((folder / "wandb.json").read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a damaged file costs the id and no save; W&B tells of it
