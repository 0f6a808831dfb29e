"""The one writer of the final DeepSpeed settings.

A JSON file of `ds_configs/` (or the user's own) is the start; it says "auto" for everything that Hydra owns,
and another value there has to agree with Hydra. `engine.overrides` go on top and may set anything that is not
owned.

DeepSpeed is told of one micro-batch a step and of no sequence parallelism: the engine ends the accumulation
itself and scales the loss for all ranks alike (`handle.py`), so nothing that rescales gradients may be set
here either.
"""

from __future__ import annotations

import copy
import difflib
import math
from dataclasses import dataclass
from typing import Any, cast

from stack.config import derive
from stack.config.checks import read_ds_config
from stack.config.convert import leaves
from stack.config.schema import RunConfig
from stack.errors import ConfigError, Fault

AUTO = "auto"
REASONS = "//"
"""Top-level entry of a file that holds remarks, since JSON has no comments."""

DEFAULTS: dict[str, Any] = {
    "steps_per_print": 10**9,  # the loop reports; DeepSpeed's own line would come every 10 steps from rank 0
    "wall_clock_breakdown": False,  # its timers synchronise the device around every phase
    "communication_data_type": "fp32",  # see ds_configs/zero3.json
}
"""Where the file is silent. Everything else is DeepSpeed's own default."""


@dataclass(frozen=True)
class _Owned:
    """key: the Hydra setting that decides. value: what a file may say in place of "auto". written: what
    DeepSpeed is told, None to leave it out."""

    key: str
    value: Any
    written: Any = None


BLOCKS = {
    "optimizer": "optim",
    "scheduler": "schedule",
    "activation_checkpointing": "memory.checkpointing",
    "torch_autocast": "engine.precision",
    "tensorboard": "log",
    "wandb": "log.wandb",
    "csv_monitor": "log",
    "comet": "log",
}
"""Sections that Hydra owns as a whole: all "auto" and dropped, or refused."""


SIZES = (
    "zero_optimization.zero_hpz_partition_size",
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "expert_parallel.autoep_size",
)
"""Layouts of ranks beside this stack's own, where they are above 1."""

REFUSED = {
    "zero_optimization.cpu_offload": ("nothing: an old name of an offload", "engine.offload_optimizer=cpu"),
    "zero_optimization.cpu_offload_params": (
        "nothing: an old name of an offload",
        "engine.offload_param=cpu",
    ),
    "zero_optimization.cpu_offload_param": ("nothing: an old name of an offload", "engine.offload_param=cpu"),
    "zero_optimization.zenflow": ("nothing: it scrambles weights (DeepSpeed 0.19)", "leave it out"),
}
"""Dotted path, where it is set to anything that is not false: what is expected, and how to mend it."""

SECTIONS = (
    "zero_optimization",
    "bf16",
    "fp16",
    "data_types",
    "flops_profiler",
    "comms_logger",
    "timers",
    "aio",
    "autotuning",
    "compile",
    "pipeline",
    "data_efficiency",
    "hybrid_engine",
    "tensor_parallel",
    "expert_parallel",
    "monitor_config",
)
"""Of DeepSpeed's files, beside the names in `deepspeed.runtime.constants`."""


def build_ds_config(cfg: RunConfig, world: int) -> dict[str, Any]:
    """Final DeepSpeed settings of a run on `world` ranks. Raises ConfigError with every disagreement."""
    base, faults = read_ds_config(cfg.engine)
    owned = _owned(cfg, world)
    base.pop(REASONS, None)
    faults += _file_faults(cfg, base, owned) + _override_faults(cfg, owned)
    if faults:
        raise ConfigError(faults)
    final = copy.deepcopy(DEFAULTS)
    for path, value in [*leaves(base), *leaves(cfg.engine.overrides)]:
        if path not in owned and path.split(".")[0] not in BLOCKS:
            _put(final, path, copy.deepcopy(value))
    for path, entry in owned.items():
        if entry.written is not None:
            _put(final, path, entry.written)
    for block in ("offload_optimizer", "offload_param"):
        if getattr(cfg.engine, block) == "none":
            final["zero_optimization"].pop(block, None)
    faults = _together(final) or _unknown(final)
    if faults:
        raise ConfigError(faults)
    return final


def _owned(cfg: RunConfig, world: int) -> dict[str, _Owned]:
    """Dotted path of every DeepSpeed setting that Hydra owns."""
    engine, optim, data = cfg.engine, cfg.optim, cfg.data
    on_host = engine.offload_optimizer != "none" and engine.cpu_optimizer == "deepspeed"
    # ZeRO-0 knows one type only, that of the parameters.
    accumulate = "fp32" if engine.stage > 0 else None
    # Always written: left out, DeepSpeed clips at 1.0. ZeRO-0 in fp32 runs the bare torch optimizer and forgets the norm
    # it clipped by, so `handle.py` clips there.
    clip = 0.0 if engine.stage == 0 and engine.precision == "fp32" else optim.clip
    table = {
        "train_micro_batch_size_per_gpu": _Owned("data.micro_batch", data.micro_batch, data.micro_batch),
        "gradient_accumulation_steps": _Owned("engine.accumulation", engine.accumulation, 1),
        "train_batch_size": _Owned("engine.accumulation", derive.rows_per_step(cfg, world)),
        "managed_gradient_accumulation": _Owned("engine", False, False),
        "gradient_clipping": _Owned("optim.clip", optim.clip, clip),
        "bf16.enabled": _Owned("engine.precision", engine.precision == "bf16", engine.precision == "bf16"),
        "fp16.enabled": _Owned("engine.precision", engine.precision == "fp16", engine.precision == "fp16"),
        "data_types.grad_accum_dtype": _Owned("engine.precision", "fp32", accumulate),
        "zero_optimization.stage": _Owned("engine.stage", engine.stage, engine.stage),
        "zero_allow_untested_optimizer": _Owned(
            "optim.name", True, True
        ),  # torch's own, not in DeepSpeed's list
        "zero_force_ds_cpu_optimizer": _Owned("engine.cpu_optimizer", on_host, on_host),
        "sequence_parallel_size": _Owned("parallel.sp", cfg.parallel.sp),
        "prescale_gradients": _Owned("engine", False),
        "gradient_predivide_factor": _Owned("engine", 1.0),
        "gradient_allreduce_op": _Owned("engine", "mean"),
        "optimizer.type": _Owned("optim.name", optim.name),
        "optimizer.params.lr": _Owned("optim.lr", optim.lr),
        "optimizer.params.betas": _Owned("optim.betas", optim.betas),
        "optimizer.params.eps": _Owned("optim.eps", optim.eps),
        "optimizer.params.weight_decay": _Owned("optim.weight_decay", optim.weight_decay),
    }
    for block in ("offload_optimizer", "offload_param"):
        device = getattr(engine, block)
        nvme_path = derive.nvme_folder(cfg) if device == "nvme" else None
        pin, path = cfg.memory.pin_memory, f"zero_optimization.{block}"
        table[f"{path}.device"] = _Owned(f"engine.{block}", device, device)
        table[f"{path}.nvme_path"] = _Owned("engine.nvme_path", engine.nvme_path, nvme_path)
        table[f"{path}.pin_memory"] = _Owned("memory.pin_memory", pin, pin)
    return table


def _file_faults(cfg: RunConfig, base: dict[str, Any], owned: dict[str, _Owned]) -> list[Fault]:
    """Values of the file that disagree with Hydra, and "auto" where nobody owns the setting."""
    file, faults = cfg.engine.ds_config or derive.ds_config_file(cfg.engine), []
    for path, value in leaves(base):
        block, known = path.split(".")[0], path in owned
        want = fix = ""
        if _is_section(path, owned) and not isinstance(value, dict):
            want, fix = "a section of settings", 'write {"enabled": "auto"} or the like'
        elif path in owned and value != AUTO and not _same(value, owned[path].value):
            key = owned[path].key
            want = f'"auto" or {owned[path].value!r}, what {key} says'
            fix = f'set {key}, or write "auto" in the file'
        elif block in BLOCKS and not known and value != AUTO:
            want, fix = (
                f'"auto": {BLOCKS[block]} says it',
                f"use {BLOCKS[block]}, and take it out of the file",
            )
        elif block not in BLOCKS and not known and value == AUTO:
            want, fix = "a value: nothing in Hydra sets it", "give a value, or take it out of the file"
        if want:
            faults.append(Fault(f"{file}: {path}", value, want, fix))
    return faults


def _override_faults(cfg: RunConfig, owned: dict[str, _Owned]) -> list[Fault]:
    """Entries of `engine.overrides` that another setting owns, or that say nothing."""
    faults = []
    for path, value in leaves(cfg.engine.overrides):
        where, block = f"engine.overrides.{path}", path.split(".")[0]
        if path in owned or block in BLOCKS:
            key = owned[path].key if path in owned else BLOCKS[block]
            faults.append(Fault(where, value, f"nothing here, since {key} says it", f"use {key}"))
        elif value == AUTO or _is_section(path, owned):
            faults.append(Fault(where, value, "a DeepSpeed setting with its value", "give the value"))
    return faults


def _together(final: dict[str, Any]) -> list[Fault]:
    """Settings that DeepSpeed accepts, or stops at late, and that are wrong here or together."""
    zero, faults = final["zero_optimization"], []
    if not zero.get("reduce_scatter", True) and not zero.get("contiguous_gradients", True):
        want = "true for one of reduce_scatter and contiguous_gradients: ZeRO-3 halves gradients without both"
        fix = "leave one of them on"
        faults.append(Fault("zero_optimization.contiguous_gradients", False, want, fix))
    if zero["stage"] < 2 and zero.get("overlap_comm"):
        want = "false below stage 2, where gradients are reduced once, at the end of the step"
        faults.append(Fault("zero_optimization.overlap_comm", True, want, "leave it out"))
    if zero["stage"] in (1, 2) and zero.get("round_robin_gradients"):
        want = "false: no reader knows that order, so exports and resumes on other ranks get wrong weights"
        faults.append(Fault("zero_optimization.round_robin_gradients", True, want, "leave it out"))
    share = _at(final, "zero_optimization.offload_optimizer.ratio")
    if share is not None and share != 1:
        want = "1: DeepSpeed steps the rest by an optimizer that no schedule and no checkpoint knows"
        faults.append(Fault("zero_optimization.offload_optimizer.ratio", share, want, "leave it out"))
    for path in SIZES:
        size = _at(final, path)
        if (size and size != 1) or size is True:
            want = "1: this stack lays out ranks and shards by itself"
            faults.append(Fault(path, size, want, "leave it out, and use parallel.sp"))
    faults += [Fault(path, _at(final, path), *told) for path, told in REFUSED.items() if _at(final, path)]
    return faults


def _at(tree: Any, path: str) -> Any:
    """None where nothing stands there."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _unknown(final: dict[str, Any]) -> list[Fault]:
    """Names and values that DeepSpeed does not take. Of those at the top it passes over what it does not know; the others
    would stop it once the model is built."""
    from deepspeed.runtime import config, constants  # 5 s, which wrong settings above need not wait for
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    removed = config._REMOVED_TOP_LEVEL_CONFIG_KEYS
    gone = [name for name in final if name in removed]
    faults = [Fault(name, final[name], f"nothing: {removed[name]}", "leave it out") for name in gone]
    known = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    known |= {*SECTIONS, *BLOCKS, *DEFAULTS, *gone}
    for name in final.keys() - known:
        if near := difflib.get_close_matches(name, known, 1, 0.85):
            want = f"{near[0]}, or another name that DeepSpeed knows"
            faults.append(Fault(name, final[name], want, "mend the name"))
    names = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    try:
        DeepSpeedZeroConfig(**final["zero_optimization"])
    except ValueError as error:  # pydantic's
        for each in cast(Any, error).errors():
            name, *below = each["loc"]
            near = [] if below or name in names else difflib.get_close_matches(name, names, 1)
            fix = f"{near[0] if near else 'mend it'}, or leave it out"
            path = ".".join(map(str, ("zero_optimization", *each["loc"])))
            faults.append(Fault(path, each["input"], f"what DeepSpeed takes: {each['msg']}", fix))
    return faults


def _is_section(path: str, owned: dict[str, _Owned]) -> bool:
    return any(name.startswith(f"{path}.") for name in owned)


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return math.isclose(value, expected)
    if isinstance(value, str) and isinstance(expected, str):
        return value.lower() == expected.lower()
    return value == expected


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value
