"""Numbers that follow from the settings, each worked out in one place."""

from __future__ import annotations

import hashlib
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from stack.config.schema import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from stack.config.schema_cluster import ClusterConfig

REPO_ROOT = Path(__file__).resolve().parents[2]
"""Folder that holds `conf/` and `ds_configs/`."""


def run_folder(cfg: RunConfig) -> Path:
    """Folder of the run: from its name alone, so that every rank and every restart finds the same one."""
    return Path(cfg.out) / cfg.name


def nvme_folder(cfg: RunConfig) -> str | None:
    """Folder of this run's files on the NVMe disk: DeepSpeed names them alike in all runs, so that two would write over
    each other's."""
    if cfg.engine.nvme_path is None:
        return None
    run = hashlib.sha256(str(run_folder(cfg).expanduser().resolve()).encode()).hexdigest()
    return str(Path(cfg.engine.nvme_path) / f"run-{run[:12]}")


def ranks_per_node(cluster: ClusterConfig) -> int:
    """Ranks on each node of a job."""
    return cluster.ranks_per_node or max(1, cluster.gpus_per_node)


def time_limit_s(text: str) -> int | None:
    """Seconds of a time limit as Slurm writes it; None if it is none, or no limit at all."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, first, second, third = match.groups()
    if days is not None or third is not None:  # DAYS-HOURS[:MINUTES[:SECONDS]] or HOURS:MINUTES:SECONDS
        parts = (int(days or 0), int(first), int(second or 0), int(third or 0))
    else:  # MINUTES[:SECONDS]
        parts = (0, 0, int(first), int(second or 0))
    return (((parts[0] * 24 + parts[1]) * 60 + parts[2]) * 60 + parts[3]) or None


def data_parallel(parallel: ParallelConfig, world: int) -> int:
    """Groups of ranks that work on different rows."""
    return world // parallel.sp


def seq_local(data: DataConfig, parallel: ParallelConfig) -> int:
    """Tokens of a row on one rank, padding included."""
    return math.ceil(data.seq_len / parallel.sp)


def rows_per_step(cfg: RunConfig, world: int) -> int:
    """Rows of one full optimizer step over all ranks."""
    return cfg.data.micro_batch * cfg.engine.accumulation * data_parallel(cfg.parallel, world)


def total_steps(schedule: ScheduleConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the run."""
    return schedule.steps if schedule.steps is not None else (schedule.epochs or 1) * steps_per_epoch


def decay_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Steps of the final decay of `wsd` in a run of `steps`: as given, else a tenth of the run and at least
    one."""
    return schedule.decay_steps if schedule.decay_steps is not None else max(1, steps // 10)


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Fields of the Hugging Face config: those of a readable model folder, else the ones in the YAML. {} if
    unknown."""
    own = _read_model_folder(model.path) if model.path else {}
    return own or model.architecture


@cache
def _read_model_folder(path: str) -> dict[str, Any]:
    file = Path(path).expanduser() / "config.json"
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
    ):  # no such folder (a hub name) or a broken file: building the model reports that
        return {}
    return read if isinstance(read, dict) else {}


def rope_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a Hugging Face config, old layout (`rope_scaling`, `rope_theta`) or new
    (`rope_parameters`), as one dict; `rope_type` "default" where nothing is stretched."""
    rope = dict(fields.get("rope_scaling") or {}) | dict(fields.get("rope_parameters") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if "rope_theta" not in rope and "rope_theta" in fields:
        rope["rope_theta"] = fields["rope_theta"]
    return rope


def original_length(model: ModelConfig) -> int | None:
    """Tokens the model was pretrained on: as given, else from its config; None if unknown."""
    if model.rope.original_length is not None:
        return model.rope.original_length
    fields = architecture(model)
    return rope_parameters(fields).get("original_max_position_embeddings") or fields.get(
        "max_position_embeddings"
    )


def reach(model: ModelConfig, seq_len: int) -> int | None:
    """Positions that the model covers under `model.rope`; None if unknown. A factor that is left out follows
    from `seq_len`, so the reach is `seq_len` then."""
    rope, fields = model.rope, architecture(model)
    original = original_length(model)
    if original is None or rope.scaling == "none":
        return original
    if rope.scaling != "checkpoint":
        return seq_len if rope.factor is None else int(original * rope.factor)
    own = rope_parameters(fields)
    if own["rope_type"] in ("linear", "dynamic", "yarn"):
        return int(original * float(own.get("factor") or 1))
    # llama3 and longrope say what they cover themselves; their factor means something else.
    return fields.get("max_position_embeddings") or original


def ds_config_file(engine: EngineConfig) -> Path | None:
    """The DeepSpeed JSON that the final settings start from; None for stage 0, which needs none."""
    if engine.ds_config is not None:
        given = Path(engine.ds_config).expanduser()
        beside_stack = REPO_ROOT / given
        return beside_stack if not given.exists() and beside_stack.exists() else given
    if engine.stage == 0:
        return None
    name = f"zero{engine.stage}"
    if engine.stage == 3:
        if engine.offload_optimizer == "nvme":
            name = "zero3_nvme"
        elif engine.offload_param == "cpu":
            name = "zero3_offload_all"
        elif engine.offload_optimizer == "cpu":
            name = "zero3_offload_optimizer"
    return REPO_ROOT / "ds_configs" / f"{name}.json"
