"""What settings mean together: every contradiction found at once, before a device is touched.

Each check yields Faults and judges only what is known. What needs the weights, the text or the device
itself is checked by the code that reads them.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from stack.config import derive
from stack.config.chat_checks import chat_faults
from stack.config.cluster_checks import cluster_faults
from stack.config.convert import below_open_key, known_keys, nearest_keys
from stack.config.data_checks import data_faults
from stack.config.mixture_checks import mixture_faults
from stack.config.model_checks import architecture_faults, model_faults
from stack.config.ranges import range_faults
from stack.config.schema import EngineConfig, MemoryConfig, RunConfig
from stack.errors import Fault


def check(cfg: RunConfig, world: int | None = None, device: str | None = None) -> list[Fault]:
    """Every setting out of its range and every contradiction in `cfg`.

    world: number of ranks, None where it is not known yet. device: "cpu" or "cuda" once known;
    `site.device` says it earlier unless it is "auto". What depends on an unknown is not judged.
    """
    if device is None and cfg.site.device != "auto":
        device = cfg.site.device
    unsound = list(architecture_faults(cfg.model))
    faults = [*range_faults(cfg), *unsound]
    bad = {fault.key for fault in faults}
    together = [
        *_parallel(cfg, world, sound=not unsound),
        *model_faults(cfg, device, sound=not unsound),
        *data_faults(cfg.data),
        *chat_faults(cfg.data),
        *mixture_faults(cfg.data),
        *_memory(cfg, device),
        *_offload(cfg),
        *_engine(cfg, device),
        *_schedule(cfg),
        *_saving(cfg),
        *_faults(cfg),
        *cluster_faults(cfg.cluster),
    ]
    # A value that is out of its range would only be complained about twice.
    return faults + [fault for fault in together if fault.key not in bad]


def _parallel(cfg: RunConfig, world: int | None, sound: bool) -> Iterator[Fault]:
    sp, key = cfg.parallel.sp, "parallel.sp"
    if sp < 1:
        return
    if world is not None and world % sp:
        start = f"deepspeed --num_gpus {sp} launch/train.py ..."
        fix = f"start a multiple of {sp} ranks ({start}), or set {key}={math.gcd(sp, world)}"
        yield Fault(key, sp, f"a divisor of the {world} rank(s) started", fix)
    heads = derive.architecture(cfg.model).get("num_attention_heads") if sound else None
    if heads and heads % sp:
        divisors = [str(number) for number in range(1, heads + 1) if heads % number == 0]
        want = f"a divisor of the model's {heads} attention heads, which the ranks share equally"
        yield Fault(key, sp, want, f"one of {', '.join(divisors)}")
    if cfg.data.seq_len < sp:
        want = f"at least one token for each of the {key}={sp} ranks"
        yield Fault("data.seq_len", cfg.data.seq_len, want, f"data.seq_len={sp * 128}")


def _memory(cfg: RunConfig, device: str | None) -> Iterator[Fault]:
    if cfg.memory.offload and cfg.memory.checkpointing != "full" and not cfg.memory.lean:
        want = "false without checkpointing or lean layers: it is what they keep that is offloaded"
        fix = "memory.checkpointing=full, or memory.offload=false"
        yield Fault("memory.offload", True, want, fix)
    yield from _spill(cfg.memory)
    if cfg.memory.fused_kernels == "liger":
        key = "memory.fused_kernels"
        if device == "cpu":
            yield Fault(key, "liger", "torch or none on the CPU: Liger's kernels need a GPU", f"{key}=auto")
        elif device == "cuda" and importlib.util.find_spec("liger_kernel") is None:
            want = "torch or none: liger_kernel is not installed"
            yield Fault(key, "liger", want, f"pip install '.[liger]', or {key}=auto")


def _spill(memory: MemoryConfig) -> Iterator[Fault]:
    folder, bound = memory.spill_folder, memory.host_gib
    if folder is None and bound is not None:
        want = "null without memory.spill_folder, where what is beyond it would go"
        yield Fault(
            "memory.host_gib", bound, want, "memory.spill_folder=/local_nvme, or memory.host_gib=null"
        )
    if folder is None:
        return
    if not (memory.lean and memory.offload):
        want = "null: only lean layers with memory.offload=true spill"
        yield Fault("memory.spill_folder", folder, want, "memory=lean, or memory.spill_folder=null")
    if bound is None:
        want = "GiB of host memory a rank may use before memory.spill_folder is used"
        yield Fault("memory.host_gib", None, want, "memory.host_gib=64")
    if not Path(folder).expanduser().is_dir():
        fix = "create it, or check the path"
        yield Fault("memory.spill_folder", folder, "a folder that exists on this node", fix)


def _offload(cfg: RunConfig) -> Iterator[Fault]:
    engine, key = cfg.engine, "engine.offload_optimizer"
    optimizer, param = engine.offload_optimizer, engine.offload_param
    if param != "none" and engine.stage != 3:
        want = f"none below stage 3 (engine.stage={engine.stage})"
        yield Fault("engine.offload_param", param, want, "engine.stage=3")
    if optimizer == "nvme" and engine.stage != 3:
        yield Fault(
            key, optimizer, f"none or cpu below stage 3 (engine.stage={engine.stage})", "engine.stage=3"
        )
    if optimizer == "cpu" and engine.stage == 0:
        want = "none at engine.stage=0, which shards no optimizer states"
        yield Fault(key, optimizer, want, "engine.stage=1, 2 or 3")
    if optimizer == "nvme":
        path = engine.nvme_path
        if not path:
            fix = "engine.nvme_path=/local_nvme"
            yield Fault("engine.nvme_path", path, "a folder on a local NVMe disk", fix)
        elif not Path(path).is_dir():
            fix = "create it, or check the path"
            yield Fault("engine.nvme_path", path, "a folder that exists on this node", fix)
    if param == "nvme":
        # The engine's swapper empties the folder that parameters of 1 MiB and more were written to (seen in fp32 and bf16).
        want = "none or cpu: DeepSpeed's start empties the folder of parameters on NVMe"
        yield Fault("engine.offload_param", "nvme", want, "engine.offload_param=cpu")
    if engine.cpu_optimizer == "deepspeed" and (optimizer == "none" or cfg.optim.name != "adamw"):
        want = "torch unless AdamW runs on the host (optim.name=adamw, engine.offload_optimizer=cpu or nvme)"
        yield Fault("engine.cpu_optimizer", "deepspeed", want, "engine.cpu_optimizer=torch")


def _engine(cfg: RunConfig, device: str | None) -> Iterator[Fault]:
    if cfg.engine.precision == "fp16" and cfg.engine.stage == 0:
        # With scale 2^26 its losses repeat to the last digit.
        want = "1, 2 or 3 under fp16, since DeepSpeed's ZeRO-0 divides gradients by a scale it never multiplied in"
        yield Fault("engine.stage", 0, want, "engine.stage=1")
    if cfg.engine.precision == "fp16" and device == "cpu":
        want = "bf16 or fp32 on the CPU, where DeepSpeed refuses fp16"
        yield Fault("engine.precision", "fp16", want, "engine.precision=bf16")
    yield from read_ds_config(cfg.engine)[1]


def read_ds_config(engine: EngineConfig) -> tuple[dict[str, Any], list[Fault]]:
    """The DeepSpeed settings that the final ones start from, {} for stage 0 and for a file that has
    faults."""
    file = derive.ds_config_file(engine)
    if file is None:
        return {}, []
    key, shown = "engine.ds_config", engine.ds_config or str(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        want = f"a file that can be read, seen from {Path.cwd()} ({error.strerror})"
        return {}, [Fault(key, shown, want, "check the path; ready ones are in ds_configs/")]
    except ValueError as error:
        return {}, [Fault(key, shown, f"a JSON file ({error})", "mend the file")]
    if not isinstance(content, dict):
        return {}, [Fault(key, shown, "a JSON object of DeepSpeed settings", "mend the file")]
    return content, []


def _schedule(cfg: RunConfig) -> Iterator[Fault]:
    plan = cfg.schedule
    if plan.steps is None and plan.epochs is None:
        want = "the length of the run, in steps or in epochs"
        yield Fault("schedule.steps", None, want, "schedule.steps=1000, or schedule.epochs=1")
    if plan.steps is not None and plan.epochs is not None:
        want = f"null beside schedule.epochs={plan.epochs}: one of the two gives the length"
        yield Fault("schedule.steps", plan.steps, want, "schedule.steps=null, or schedule.epochs=null")
    if plan.name != "wsd" and plan.decay_steps is not None:
        want = f"null with schedule.name={plan.name}"
        yield Fault("schedule.decay_steps", plan.decay_steps, want, "schedule=wsd")
    if plan.name in ("linear", "constant") and plan.min_lr_ratio:
        want = f"0 with schedule.name={plan.name}, which has no lowest rate"
        fix = "schedule=cosine, or schedule.min_lr_ratio=0"
        yield Fault("schedule.min_lr_ratio", plan.min_lr_ratio, want, fix)
    if plan.steps is not None and plan.steps > 0:
        yield from schedule_faults(cfg, plan.steps)


def schedule_faults(cfg: RunConfig, steps: int) -> Iterator[Fault]:
    """Parts of the schedule that do not fit a run of `steps`, which with `schedule.epochs` is known once the
    data is."""
    plan = cfg.schedule
    decay = derive.decay_steps(plan, steps) if plan.name == "wsd" else 0
    if plan.warmup_steps > steps:
        want, fix = f"at most the {steps} steps of the run", f"schedule.warmup_steps={steps // 10}"
        yield Fault("schedule.warmup_steps", plan.warmup_steps, want, fix)
    elif plan.warmup_steps + decay > steps:
        want = f"at most {steps - plan.warmup_steps}, what warmup leaves of the {steps} steps"
        yield Fault("schedule.decay_steps", decay, want, "shorten decay or warmup")


def _saving(cfg: RunConfig) -> Iterator[Fault]:
    weights, resume = cfg.checkpoint.weights_from, cfg.checkpoint.resume
    if weights is not None and not Path(weights).expanduser().is_dir():
        want = f"the folder of a checkpoint or of a Hugging Face model, seen from {Path.cwd()}"
        yield Fault("checkpoint.weights_from", weights, want, "check the path")
    if weights is not None and resume not in ("auto", "none"):
        want = f"null beside checkpoint.resume={resume}, which brings weights along"
        yield Fault("checkpoint.weights_from", weights, want, "give one of the two")
    for name in cfg.checkpoint.force:
        if name not in known_keys() and not below_open_key(name):
            near = " or ".join(nearest_keys(name)) or "data.path"
            yield Fault("checkpoint.force", name, "names of settings or of sections", f"did you mean {near}?")
    yield from _kept_and_copied(cfg)
    if cfg.log.eval_every and not (cfg.log.eval_rows and cfg.data.eval_fraction):
        want = "0 while nothing is held out or evaluated"
        fix = "log.eval_every=0, or data.eval_fraction and log.eval_rows above 0"
        yield Fault("log.eval_every", cfg.log.eval_every, want, fix)


def _kept_and_copied(cfg: RunConfig) -> Iterator[Fault]:
    saved, measured = cfg.checkpoint, cfg.log.eval_every
    if saved.keep_best and saved.best_metric != "loss" and saved.every % (measured or saved.every + 1):
        want = f"0 unless {saved.best_metric} is measured at each saved step, which it is every {measured} steps (0: never)"
        fix = f"log.eval_every={saved.every}, or checkpoint.best_metric=loss"
        yield Fault("checkpoint.keep_best", saved.keep_best, want, fix)
    if saved.upload is not None:
        protocol = saved.upload.partition("://")[0] if "://" in saved.upload else ""
        try:
            fsspec.get_filesystem_class(protocol or "none")
        except (ValueError, ImportError) as error:
            want = f"an address such as s3://BUCKET/FOLDER that fsspec can open ({error})"
            fix = "pip install 's3fs' for s3, 'gcsfs' for gs; a folder is file:///FOLDER"
            yield Fault("checkpoint.upload", saved.upload, want, fix)


def _faults(cfg: RunConfig) -> Iterator[Fault]:
    faults = cfg.faults
    for key, policy in (("on_nonfinite", faults.on_nonfinite), ("on_spike", faults.on_spike)):
        if policy == "rollback" and cfg.checkpoint.every == 0:
            want = "skip or stop while checkpoint.every=0: there would be no checkpoint to go back to"
            yield Fault(f"faults.{key}", policy, want, "checkpoint=regular, or faults=default")
    if faults.on_spike != "skip" and faults.spike_factor == 0:
        fix = "faults.spike_factor=3"
        yield Fault(
            "faults.on_spike", faults.on_spike, "skip while faults.spike_factor=0: none is found", fix
        )
