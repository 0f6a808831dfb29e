"""The composition of a run, from top to bottom. Every part gets its own section of the settings, never all of them.

The order: what is cheap and can fail comes first, so that a faulty start ends within seconds; the model is judged before
hours go into its tokens; parameters are filled and sharded last.
"""

from __future__ import annotations

import os
import random
import warnings
from dataclasses import asdict, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from stack.checkpoint.export_hf import export_hf
from stack.checkpoint.load import Checkpoint, check_layout, find_checkpoint, load_checkpoint, set_aside_newer
from stack.checkpoint.manifest import step_folders
from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState, model_fingerprint
from stack.config import derive
from stack.config.checks import check
from stack.config.schema import RunConfig
from stack.data.loader import EvalLoader, Loader
from stack.data.prepare import ensure_store
from stack.data.store import TokenStore
from stack.data.tokenizer import load_tokenizer
from stack.dist.agree import on_main, on_main_slowly
from stack.dist.env import read_rank_env
from stack.dist.failure import guard
from stack.dist.topology import Topology, init_topology
from stack.engine.ds_config import build_ds_config
from stack.engine.schedule import lr_factor
from stack.errors import ConfigError
from stack.methods import build_method
from stack.models.attention import attention_faults
from stack.models.build import DTYPES, BlankModel, BuiltModel, check_positions, fill_model, prepare_model
from stack.models.flops import hardware_flops, model_flops
from stack.models.hub import fetch
from stack.train.console import ConsoleHook, format_duration
from stack.train.evaluate import evaluate
from stack.train.folder import RunFolder, take_folder, write_config
from stack.train.hooks import CheckpointHook, EvaluationHook, Hook
from stack.train.journal import JournalHook, read_journal
from stack.train.loop import Job, train
from stack.train.metrics import FlopCounter, Meter, device_peak_tflops
from stack.train.report import draw_curve, summarize
from stack.train.wandb import WandbHook, wandb_mode

if TYPE_CHECKING:
    from stack.engine.handle import Engine


def run(cfg: RunConfig) -> None:
    """Train as `cfg` says, on the ranks that the launcher started. Raises StackError with the cause if it cannot."""
    env = read_rank_env(os.environ)
    device = choose_device(cfg)
    if faults := check(cfg, env.world, device):
        raise ConfigError(faults)
    ds_config = build_ds_config(cfg, env.world)
    with guard(env):
        topology = init_topology(env, cfg.parallel.sp, device, cfg.engine.timeout_s)
        try:
            run_ranks(cfg, topology, ds_config)
        except BaseException:
            # With more ranks the guard ends them all at once, and closing would wait for them.
            if topology.world == 1:
                topology.close()
            raise
        topology.close()


def run_ranks(cfg: RunConfig, topology: Topology, ds_config: dict[str, Any]) -> None:
    """What all ranks do together."""
    # DeepSpeed takes its device when it is imported, so not before `choose_device`.
    from stack.engine.build import build_engine
    from stack.engine.build_ops import build_ops
    from stack.engine.zero_init import join_deepspeed, zero3_partitioner
    from stack.parallel.apply import apply_parallelism

    quiet_libraries()
    folder, lock = open_folder(cfg, topology)
    layout = make_layout(cfg, topology)
    checkpoint = look_for_checkpoint(cfg, folder, layout, topology)
    seed_everything(cfg.seed + topology.rank)

    blank = judge_model(cfg, topology)
    store = open_store(cfg, topology)
    loader = make_loader(cfg, store, topology)
    total_steps = derive.total_steps(cfg.schedule, loader.steps_per_epoch)
    join_deepspeed(topology)
    build_ops(ds_config, topology, tell)
    partition = zero3_partitioner(ds_config, DTYPES[cfg.engine.precision]) if cfg.engine.stage == 3 else None
    built = fill_model(blank, partition)
    remarks = apply_parallelism(
        built.model, built.spec, cfg.memory, cfg.model.attention, cfg.engine.stage, topology
    )
    if topology.is_main:
        for remark in remarks:
            tell(remark)
    engine = build_engine(built.model, cfg.optim, topology, ds_config)
    layout["model"] = model_fingerprint(built.model)
    state = TrainState()
    if checkpoint is not None:
        state = resume(checkpoint, layout, total_steps, engine, loader, folder, topology)
    check_positions(built)
    if topology.is_main:
        write_config(folder, cfg, tell)

    lean = cfg.memory.lean and not remarks
    job = make_job(cfg, engine, loader, built, total_steps, topology, lean)
    saver = Saver(folder.checkpoints, topology, layout, total_steps, cfg.checkpoint.keep, tell)
    hooks = make_hooks(cfg, job, store, saver, folder, state.step, total_steps)
    train(job, state, total_steps, Meter(topology, job.flops), hooks)
    for hook in hooks:
        hook.close()
    finish(cfg, engine, built, store, folder, total_steps, topology)
    engine.close()
    if lock is not None:
        lock.close()


def tell(text: str) -> None:
    """A line for the person at the console; called on rank 0."""
    print(text, flush=True)


def choose_device(cfg: RunConfig) -> str:
    """`cuda` or `cpu`; DeepSpeed is told of it before it is imported, since it would choose by itself otherwise."""
    device = cfg.site.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["DS_ACCELERATOR"] = device
    return device


def quiet_libraries() -> None:
    """DeepSpeed 0.19 calls collectives by names that torch 2.13 renamed: a warning a step from every rank."""
    warnings.filterwarnings(
        "ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning
    )


def open_folder(cfg: RunConfig, topology: Topology) -> tuple[RunFolder, IO[str] | None]:
    """The run folder, made and locked by rank 0; the others take its path from there. The lock holds while it is open."""
    lock: IO[str] | None = None
    folder: RunFolder | None = None
    if topology.is_main:
        path = derive.run_folder(cfg).expanduser().resolve()
        folder, lock = take_folder(path, tell)
        tell(f"run folder: {folder.path}")
    return topology.broadcast_object(folder), lock


def make_layout(cfg: RunConfig, topology: Topology) -> dict[str, Any]:
    """What a checkpoint can only be continued under."""
    return {
        "world": topology.world,
        "sp": topology.sp,
        "stage": cfg.engine.stage,
        "precision": cfg.engine.precision,
        "optimizer": cfg.optim.name,
        "rows_per_step": derive.rows_per_step(cfg, topology.world),
    }


def look_for_checkpoint(
    cfg: RunConfig, folder: RunFolder, layout: dict[str, Any], topology: Topology
) -> Checkpoint | None:
    """The checkpoint to go on from, or None; refused here, before anything is built, if it cannot fit."""

    def look() -> Checkpoint | None:
        found = find_checkpoint(folder.checkpoints, cfg.checkpoint.resume, tell)
        if found is not None:
            check_layout(found, layout)
        return found

    return on_main(topology, look)


def seed_everything(seed: int) -> None:
    """The generators that nothing in this stack should need, but a model's dropout does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def judge_model(cfg: RunConfig, topology: Topology) -> BlankModel:
    """The model without values: everything that can be wrong with it is found here."""
    path, dtype = cfg.model.path, DTYPES[cfg.engine.precision]
    if faults := attention_faults(cfg.model.attention, topology.device.type, dtype):
        raise ConfigError(faults)
    sharded = cfg.engine.stage == 3
    if path is not None and cfg.model.init == "pretrained":
        # Rank 0 downloads, if need be; the others find it in the cache they share, or read nothing under ZeRO-3.
        beat = partial(tell_waiting, f"fetching {path}")
        on_main_slowly(topology, lambda: fetch(path, weights=True), beat)
    blank = prepare_model(
        cfg.model,
        cfg.data.seq_len,
        dtype,
        cfg.seed,
        reads_weights=topology.is_main or not sharded,
    )
    if topology.is_main:
        drawn = f"drawn from seed {cfg.seed} (model.init=scratch)"
        tell(f"weights: {drawn if cfg.model.init == 'scratch' else f'read from {blank.built.folder}'}")
        for note in blank.built.notes:
            tell(note)
    topology.barrier()  # no rank goes on to the collectives of building before all have found the model sound
    return blank


def tell_waiting(what: str, seconds: float) -> None:
    """A sign of life while other ranks wait for rank 0."""
    tell(f"still {what} ({format_duration(seconds)})")


def open_store(cfg: RunConfig, topology: Topology) -> TokenStore:
    """The tokens, prepared by rank 0 if they are not there."""
    prepare = partial(
        ensure_store,
        cfg.data,
        tokenizer_path=cfg.model.tokenizer or cfg.model.path,
        model_vocab=derive.architecture(cfg.model).get("vocab_size"),
        seed=cfg.seed,
        say=tell,
    )
    return TokenStore(on_main_slowly(topology, prepare, partial(tell_waiting, "preparing tokens")))


def make_loader(cfg: RunConfig, store: TokenStore, topology: Topology) -> Loader:
    """Training rows of this rank."""
    loader = Loader(
        store,
        cfg.data,
        dp=topology.dp,
        dp_rank=topology.dp_rank,
        accumulation=cfg.engine.accumulation,
        seed=cfg.seed,
        epochs=cfg.schedule.epochs,
    )
    if topology.is_main:
        tell(f"training: {loader.account}")
    return loader


def resume(
    checkpoint: Checkpoint,
    layout: dict[str, Any],
    total_steps: int,
    engine: Engine,
    loader: Loader,
    folder: RunFolder,
    topology: Topology,
) -> TrainState:
    """Everything back to where the checkpoint was."""
    check_layout(checkpoint, layout)
    state = load_checkpoint(checkpoint, engine, loader, topology)
    if topology.is_main:
        tell(f"resuming from step {state.step}: {checkpoint.path}")
        planned = checkpoint.manifest.steps_planned
        if planned != total_steps:
            tell(
                f"the run was planned for {planned} steps and is for {total_steps} now: from step {state.step + 1} on the "
                "learning rate follows the course of the new length"
            )
        if state.step >= total_steps:
            tell(
                f"all {total_steps} steps are done already: raise schedule.steps or schedule.epochs to go on"
            )
        set_aside_newer(folder.checkpoints, checkpoint, tell)
    topology.barrier()
    return state


def make_job(
    cfg: RunConfig,
    engine: Engine,
    loader: Loader,
    built: BuiltModel,
    total_steps: int,
    topology: Topology,
    lean: bool,
) -> Job:
    """What the loop needs for a step. lean: the blocks run as lean layers."""
    factor = lr_factor(cfg.schedule, total_steps)
    peak = device_peak_tflops(topology.device, cfg.site.peak_tflops)
    hardware = partial(
        hardware_flops,
        built.spec,
        checkpointing=cfg.memory.checkpointing == "full",
        tiled_mlp=cfg.memory.tiled_mlp,
        lean=lean,
    )
    return Job(
        topology=topology,
        engine=engine,
        method=build_method(cfg.method),
        loader=loader,
        lr_at=lambda step: cfg.optim.lr * factor(step),
        rows_per_step=loader.rows_per_step,
        max_nonfinite_steps=cfg.engine.max_nonfinite_steps,
        flops=None if peak is None else FlopCounter(partial(model_flops, built.spec), hardware, peak),
    )


def make_hooks(
    cfg: RunConfig,
    job: Job,
    store: TokenStore,
    saver: Saver,
    folder: RunFolder,
    resume_step: int,
    total_steps: int,
) -> list[Hook]:
    """In the order in which they are called: numbers are made, then kept and shown, then the step is saved."""
    topology, log = job.topology, cfg.log
    hooks: list[Hook] = []
    rows = EvalLoader(store, cfg.data, dp=topology.dp, dp_rank=topology.dp_rank, max_rows=log.eval_rows)
    if topology.is_main and log.eval_rows:
        tell(rows.describe())
    if rows.num_rows:
        # Plain cross-entropy, whatever is added to it in training, so that perplexity means what it says.
        method = build_method(replace(cfg.method, label_smoothing=0.0, z_loss=0.0))
        measure = partial(evaluate, job.engine, method, rows, topology)
        hooks.append(EvaluationHook(measure, log.eval_every, total_steps))
    if topology.is_main:
        hooks += [JournalHook(folder.journal, resume_step), ConsoleHook(log.every, total_steps)]
        earlier = read_journal(folder.journal)
        mode = wandb_mode(log, os.environ)
        if mode != "disabled":
            hooks.append(WandbHook(log, mode, cfg.name, folder.path, asdict(cfg), earlier, tell))
    save = partial(saver.save, job.engine)
    hooks.append(CheckpointHook(save, cfg.checkpoint.every, cfg.checkpoint.final, total_steps))
    return hooks


def finish(
    cfg: RunConfig,
    engine: Engine,
    built: BuiltModel,
    store: TokenStore,
    folder: RunFolder,
    total_steps: int,
    topology: Topology,
) -> None:
    """The Hugging Face folder, the curve, and where everything is."""
    if cfg.checkpoint.export:
        # The store may have been made by a run that knew the same tokenizer by another path.
        path = store.trained_tokenizer or cfg.model.tokenizer or cfg.model.path
        tokenizer = load_tokenizer(path) if store.tokenizer and path and topology.is_main else None
        dtype = DTYPES[cfg.engine.precision]
        export_hf(built, engine.named_full_parameters(), folder.model, dtype, tokenizer, topology.is_main)
    if topology.is_main:
        records = read_journal(folder.journal)
        draw_curve(records, folder.curve, cfg.name)
        places = {"run folder": folder.path, "curve": folder.curve, "numbers": folder.journal}
        places |= {"checkpoints": folder.checkpoints} if step_folders(folder.checkpoints) else {}
        places |= {"model": folder.model} if cfg.checkpoint.export else {}
        offline = wandb_mode(cfg.log, os.environ) == "offline"
        tell(summarize(records, places, total_steps, offline))
    topology.barrier()
