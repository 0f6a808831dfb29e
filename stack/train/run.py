"""The composition of a run, from top to bottom. Every part gets its own section of the settings, never all of them.

The order: what is cheap and can fail comes first, so that a faulty start ends within seconds; the model is judged before
hours go into its tokens; parameters are filled and sharded last.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stack.checkpoint.manifest import step_folders
from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState, model_fingerprint
from stack.config import derive
from stack.config.checks import check
from stack.config.schema import RunConfig
from stack.data.loader import Loader
from stack.data.mixture import Share
from stack.data.store import TokenStore
from stack.dist.agree import on_main_slowly
from stack.dist.env import read_rank_env
from stack.dist.failure import guard
from stack.dist.topology import Topology, init_topology
from stack.dist.watch import Watch
from stack.engine.ds_config import build_ds_config
from stack.engine.schedule import lr_factor
from stack.errors import ConfigError
from stack.methods import build_method
from stack.models.attention import attention_faults
from stack.models.build import DTYPES, BlankModel, BuiltModel, check_positions, fill_model, prepare_model
from stack.models.flops import hardware_flops, model_flops
from stack.models.hub import fetch
from stack.models.safetensors_file import Entry
from stack.models.spec import ModelSpec
from stack.train.calibration import calibration_hooks
from stack.train.console import ConsoleHook, tell, tell_waiting
from stack.train.evaluate import evaluate
from stack.train.exporting import export_at_end, keep_export_files
from stack.train.feeding import LoaderHook, make_eval_rows, make_loader, open_stores
from stack.train.folder import RunFolder, take_folder, write_config
from stack.train.forecast import Outlook, announce, look_ahead
from stack.train.hooks import CheckpointHook, EvaluationHook, Hook, StallHook
from stack.train.host_room import check_host_room, make_nvme_room
from stack.train.journal import JournalHook, read_journal
from stack.train.loop import Job, train
from stack.train.memory_advice import advise_host, explain, is_shortage
from stack.train.metrics import FlopCounter, Meter, device_peak_tflops
from stack.train.report import draw_curve, summarize
from stack.train.resume import look_for_checkpoint, make_layout, resume
from stack.train.run_lock import RunLock
from stack.train.saving import make_saver
from stack.train.stopping import Keeper, end_stopped, resume_command
from stack.train.wandb import WandbHook, wandb_mode
from stack.train.warm_start import find_weights

if TYPE_CHECKING:
    from stack.engine.handle import Engine
    from stack.parallel.apply import Applied


def run(cfg: RunConfig) -> None:
    """Train as `cfg` says, on the ranks that the launcher started. Raises StackError with the cause if it cannot."""
    env = read_rank_env(os.environ)
    device = choose_device(cfg)
    if faults := check(cfg, env.world, device):
        raise ConfigError(faults)
    ds_config = build_ds_config(cfg, env.world)
    outlook = look_ahead(cfg, env, device)
    with guard(env) as watch:
        topology = init_topology(env, cfg.parallel.sp, device, cfg.engine.timeout_s)
        try:
            with open_folder(cfg, topology) as folder:
                run_ranks(cfg, topology, ds_config, folder, watch, outlook)
        except BaseException as error:
            # With more ranks the guard ends them all at once, and closing would wait for them.
            if topology.world == 1:
                topology.close()
            if (told := watch.explain(error)) is not error:
                raise told from error
            raise
        topology.close()


def run_ranks(
    cfg: RunConfig,
    topology: Topology,
    ds_config: dict[str, Any],
    folder: RunFolder,
    watch: Watch,
    outlook: Outlook,
) -> None:
    """What all ranks do together."""
    quiet_libraries()
    command = resume_command(watch.env)
    layout = make_layout(cfg, ds_config, topology)
    checkpoint = look_for_checkpoint(cfg, folder, layout, topology)
    seed_everything(cfg.seed + topology.rank)

    blank = judge_model(cfg, topology, find_weights(cfg, checkpoint, topology), checkpoint is not None)
    on_gpu = topology.device.type == "cuda"
    check_host_room(cfg, blank.built.spec, watch.env, on_gpu, outlook.checkpoint_copy_bytes, tell)
    make_nvme_room(cfg, blank.built.model, watch.env)
    if on_gpu and cfg.engine.offload_optimizer != "none":
        use_cores(watch.env.local_world)
    stores = open_stores(cfg, topology)
    watch_over(watch, cfg, blank.built.spec, folder, topology)
    loader = make_loader(cfg, stores, topology)
    outlook = announce(outlook, [share.store for share in stores], topology, tell)
    total_steps = derive.total_steps(cfg.schedule, loader.steps_per_epoch)
    built, applied, engine = build(cfg, blank, ds_config, topology)
    layout["model"] = model_fingerprint(built.model)
    state = TrainState()
    if checkpoint is not None:
        state = resume(cfg, checkpoint, layout, total_steps, engine, loader, folder, topology)
    check_positions(built)
    if topology.is_main:
        write_config(folder, cfg)
        keep_export_files(cfg, built, stores[0].store, folder)
        folder.stopped.unlink(missing_ok=True)

    job = make_job(cfg, engine, loader, built, total_steps, topology, applied.lean)
    saver = make_saver(cfg, folder, layout, state, total_steps, topology)
    hooks = make_hooks(cfg, job, stores, loader, saver, folder, state, total_steps)
    hooks[-1:-1] = calibration_hooks(outlook, folder.calibration, topology, tell)
    keeper = make_keeper(cfg, job, saver, folder, watch, state.step)
    stopped = train(job, state, total_steps, Meter(topology, job.flops), hooks) or asked_late(job, watch)
    watch.enter("end", f"at the end, behind step {state.step}")
    if stopped:
        end_stopped(keeper, state, watch.stop.wish, folder.stopped, command)
    else:
        watch.stop.undefer()
    watch.disarm()  # uploads and the export take as long as they take
    for hook in hooks:
        hook.close()
    if stopped:
        watch.stop.ignore()
    else:
        finish(cfg, engine, built, stores[0].store, folder, total_steps, topology)
    engine.close()


def build(
    cfg: RunConfig, blank: BlankModel, ds_config: dict[str, Any], topology: Topology
) -> tuple[BuiltModel, Applied, Engine]:
    """The model filled, sharded and made parallel, in its engine."""
    # DeepSpeed takes its device when it is imported, so not before `choose_device`.
    from stack.engine.build import build_engine
    from stack.engine.build_ops import build_ops
    from stack.engine.zero_init import join_deepspeed, zero3_partitioner
    from stack.parallel.apply import apply_parallelism

    join_deepspeed(topology)
    build_ops(ds_config, topology, tell)
    partition = zero3_partitioner(ds_config, DTYPES[cfg.engine.precision]) if cfg.engine.stage == 3 else None
    built = fill_model(blank, partition)
    applied = apply_parallelism(
        built.model, built.spec, cfg.memory, cfg.model.attention, cfg.engine.stage, topology
    )
    for remark in applied.remarks if topology.is_main else ():
        tell(remark)
    engine = build_engine(built.model, cfg.optim, topology, ds_config)
    return built, applied, engine


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


@contextmanager
def open_folder(cfg: RunConfig, topology: Topology) -> Iterator[RunFolder]:
    """The run folder, made and locked by rank 0 until the work is done; the others take its path from there."""
    lock: RunLock | None = None
    folder: RunFolder | None = None
    if topology.is_main:
        path = derive.run_folder(cfg).expanduser().resolve()
        folder, lock = take_folder(path, tell)
        tell(f"run folder: {folder.path}")
    try:
        yield topology.broadcast_object(folder)
    except BaseException:
        # With more ranks the lock ends with the processes, since until then another rank may still be at work.
        if lock is not None and topology.world == 1:
            lock.close()
        raise
    if lock is not None:
        lock.close()


def watch_over(watch: Watch, cfg: RunConfig, spec: ModelSpec, folder: RunFolder, topology: Topology) -> None:
    """From here on hung ranks are noticed, and a want of memory is told with what would help."""
    settings = (cfg, spec, topology.world, topology.device.type)
    watch.explain = lambda error: explain(error, *settings) if is_shortage(error) else error
    watch.memory_advice = lambda: advise_host(*settings)
    watch.arm(cfg.faults.watchdog_s, folder.stacks)


def seed_everything(seed: int) -> None:
    """The generators that nothing in this stack should need, but a model's dropout does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def use_cores(local_world: int) -> None:
    """For an optimizer on the host: at least as many threads as cores for each rank of the node. torchrun gives a rank one,
    which moves 18 GB/s where the memory of a node of 8 GPUs moves 400."""
    cores = len(os.sched_getaffinity(0)) // local_world
    if cores > torch.get_num_threads():
        torch.set_num_threads(cores)


def judge_model(
    cfg: RunConfig, topology: Topology, weights: Mapping[str, Entry] | None = None, resumed: bool = False
) -> BlankModel:
    """The model without values: everything that can be wrong with it is found here. weights: see `find_weights`.

    resumed: a checkpoint will fill it, so that there is nothing to say of where its first weights come from.
    """
    path, dtype = cfg.model.path, DTYPES[cfg.engine.precision]
    if faults := attention_faults(cfg.model.attention, topology.device.type, dtype):
        raise ConfigError(faults)
    sharded = cfg.engine.stage == 3
    if path is not None and cfg.model.init == "pretrained":
        # Rank 0 downloads, if need be; the others find it in the cache they share, or read nothing under ZeRO-3.
        beat = partial(tell_waiting, f"fetching {path}")
        on_main_slowly(topology, lambda: fetch(path, weights=weights is None), beat)
    blank = prepare_model(
        cfg.model,
        cfg.data.seq_len,
        dtype,
        cfg.seed,
        reads_weights=topology.is_main or not sharded,
        weights=weights,
    )
    if topology.is_main:
        drawn, read = f"drawn from seed {cfg.seed} (model.init=scratch)", f"read from {blank.built.folder}"
        given = f"checkpoint.weights_from={cfg.checkpoint.weights_from}"
        if not resumed:
            tell(
                f"weights: {given if weights is not None else drawn if cfg.model.init == 'scratch' else read}"
            )
        for note in blank.built.notes:
            tell(note)
    topology.barrier()  # no rank goes on to the collectives of building before all have found the model sound
    return blank


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
        faults=cfg.faults,
    )


def make_hooks(
    cfg: RunConfig,
    job: Job,
    stores: list[Share],
    loader: Loader,
    saver: Saver,
    folder: RunFolder,
    state: TrainState,
    total_steps: int,
) -> list[Hook]:
    """In the order in which they are called: numbers are made, then kept and shown, then the step is saved."""
    topology, log = job.topology, cfg.log
    hooks: list[Hook] = [StallHook(saver.take_stall_s), LoaderHook(loader)]
    rows = make_eval_rows(cfg, stores, topology)
    if rows.num_rows:
        # Plain cross-entropy, whatever is added to it in training, so that perplexity means what it says.
        method = build_method(replace(cfg.method, label_smoothing=0.0, z_loss=0.0))
        measure = partial(evaluate, job.engine, method, rows, topology, lambda: job.wish())
        hooks.append(EvaluationHook(measure, log.eval_every, total_steps))
    if topology.is_main:
        # A record whose evaluation is still to come is shown then.
        shown = state.step - bool(state.pending_record)
        hooks += [JournalHook(folder.journal, shown), ConsoleHook(log.every, total_steps)]
        earlier = read_journal(folder.journal)
        mode = wandb_mode(log, os.environ)
        if mode != "disabled":
            hooks.append(WandbHook(log, mode, cfg.name, folder.path, asdict(cfg), earlier, tell))
    saving = cfg.checkpoint
    going_back = cfg.faults.on_nonfinite == "rollback"
    hooks.append(CheckpointHook(saver, job.engine, saving.every, saving.final, total_steps, going_back))
    return hooks


def make_keeper(
    cfg: RunConfig, job: Job, saver: Saver, folder: RunFolder, watch: Watch, start_step: int
) -> Keeper:
    """What a stop, and a way back from bad steps, need of the checkpoints. From here on a signal is a wish to stop."""
    saves = cfg.checkpoint.every > 0 or cfg.checkpoint.final
    keeper = Keeper(
        folder.checkpoints,
        saver,
        job.engine,
        job.loader,
        job.topology,
        saves,
        cfg.faults.max_rollbacks,
        tell,
        start_step,
    )
    job.go_back, job.settle, job.enter = keeper.go_back, keeper.settle, watch.enter
    job.wish = lambda: watch.stop.wish is not None
    watch.stop.defer()
    return keeper


def asked_late(job: Job, watch: Watch) -> bool:
    """Collective. Wait for the last save, which no signal may end; whether one came meanwhile, for the rest to be left to
    the next start."""
    watch.disarm()  # it takes as long as it takes
    job.settle()
    return job.topology.sum(int(job.wish())) > 0


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
        export_at_end(cfg, engine, built, store, folder, topology)
    if topology.is_main:
        records = read_journal(folder.journal)
        draw_curve(records, folder.curve, cfg.name)
        places = {"run folder": folder.path, "curve": folder.curve, "numbers": folder.journal}
        places |= {"checkpoints": folder.checkpoints} if step_folders(folder.checkpoints) else {}
        places |= {"model": folder.model} if cfg.checkpoint.export else {}
        offline = wandb_mode(cfg.log, os.environ) == "offline"
        tell(summarize(records, places, total_steps, offline))
    topology.barrier()
