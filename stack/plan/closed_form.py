"""The closed form: a run's forecast in well under a second, without torch.

    plan(cfg, world, machine)      the Forecast

What it does not know is named in `not_modelled`; `stack/bench/exact.py` counts the same with the real step.
"""

from __future__ import annotations

import gc
from dataclasses import replace

from stack.config.kept import page_locked
from stack.config.schema import RunConfig
from stack.plan.forecast import GIB, Constant, Forecast, Host, Memory
from stack.plan.machine import Machine
from stack.plan.seconds import count_flops, step_time
from stack.plan.settings import Settings, resolve
from stack.plan.states import States
from stack.plan.step import count
from stack.plan.traffic import Traffic, traffic_of

SHORT_S = 5.0
"""Seconds of a step below which published ones were up to a fifth off, and tiny ones took twice as long as forecast."""

PROCESS_GIB = 3.0
"""GiB of host memory of a rank beside what is counted: Python, torch, CUDA's host side, the loader. Assumed."""


def plan(cfg: RunConfig, world: int, machine: Machine, documents: tuple[int, ...] | None = None) -> Forecast:
    """world: ranks. documents: see `settings.resolve`. Raises ConfigError for what the closed form does not know."""
    settings = resolve(cfg, world, documents)
    collecting = gc.isenabled()
    gc.disable()  # tensors die with their last reference; nothing may keep one until a collection
    try:
        counted = count(settings)
    finally:
        if collecting:
            gc.enable()
    states, traffic = counted.states, traffic_of(settings, counted)
    flops = count_flops(settings)
    time = step_time(settings, machine, flops, traffic, states)
    live = Memory(
        phases=counted.phases,
        states_bytes=states.parameters + states.gradients + states.optimizer + states.buckets,
    )
    missing = [f"step time: {name} is not known" for name in machine.missing(world)]
    missing += _left_out(machine, traffic, states) if time.seconds else []
    if 0 < time.seconds < SHORT_S:
        missing.append(f"launching kernels and reading data, which steps below {SHORT_S:.0f} s may wait for")
    constants = machine.constants()
    constants["host_process_gib"] = Constant(PROCESS_GIB, "GiB a rank", "assumed (stack/plan/closed_form.py)")
    return Forecast(
        tier="closed form",
        run=describe(settings),
        memory=with_overhead(live, settings, machine, counted.pools_bytes),
        host=host_of(settings, machine, states, traffic),
        checkpoint_bytes=states.written * world,
        flops=flops,
        time=time,
        tokens_a_step=settings.tokens_a_step,
        steps=cfg.schedule.steps,
        communication=traffic.by_kind(),
        host_traffic_bytes=traffic.host_bytes + traffic.optimizer_bytes,
        not_modelled=[*settings.not_modelled, *missing],
        assumptions=[*settings.assumed, *machine.remarks],
        constants=constants,
    )


def _left_out(machine: Machine, traffic: Traffic, states: States) -> list[str]:
    """Parts of a step time whose rates nobody gave."""
    site = machine.site
    parts = (
        (traffic.spilled_bytes and site.disk_gb_s is None, "waiting for the local disk: site.disk_gb_s"),
        (
            states.host_optimizer and site.host_memory_gb_s is None,
            "the optimizer's own work on the host: site.host_memory_gb_s",
        ),
    )
    return [f"{words} is not known, and the step time leaves it out" for wanted, words in parts if wanted]


def describe(settings: Settings) -> dict[str, object]:
    """What was planned, for the head of a report."""
    cfg = settings.cfg
    return {
        "name": cfg.name,
        "model": cfg.model.name,
        "parameters": settings.shape.num_parameters,
        "seq_len": cfg.data.seq_len,
        "micro_batch": cfg.data.micro_batch,
        "accumulation": cfg.engine.accumulation,
        "ranks": settings.world,
        "sp": cfg.parallel.sp,
        "dp": settings.dp,
        "stage": cfg.engine.stage,
        "layers": settings.form,
        "memory": cfg.memory.name,
        "attention": cfg.model.attention,
        "precision": cfg.engine.precision,
        "site": cfg.site.name,
    }


def with_overhead(memory: Memory, settings: Settings, machine: Machine, pools: int) -> Memory:
    """What lies outside torch's live tensors. Nothing on a CPU. pools: see `step.Counted`."""
    site, world, sp = machine.site, settings.world, settings.cfg.parallel.sp
    if site.device == "cpu":
        return memory
    communicators = (world > 1) + (1 < sp < world)
    neighbours = min(sp, site.gpus_a_node or sp) - 1
    communication = site.communicator_gib * communicators + site.exchange_gib * neighbours
    # A measured reserve has the pools in it.
    reserve = site.reserve_share * memory.peak.num_bytes + (0 if machine.calibrated(world) else pools)
    overhead = site.context_gib * GIB + reserve
    return replace(memory, communication_bytes=round(communication * GIB), overhead_bytes=round(overhead))


def host_of(settings: Settings, machine: Machine, states: States, traffic: Traffic) -> Host:
    a_node = machine.site.gpus_a_node or settings.world
    return Host(
        kept_bytes=traffic.kept_bytes,
        optimizer_bytes=states.host_optimizer,
        parameter_bytes=states.host_parameters,
        buffer_bytes=round(PROCESS_GIB * GIB),
        checkpoint_copy_bytes=_checkpoint_copy(settings, machine, states),
        spilled_bytes=traffic.spilled_bytes,
        nvme_bytes=states.nvme,
        ranks_a_node=min(settings.world, a_node),
    )


def _checkpoint_copy(settings: Settings, machine: Machine, states: States) -> int:
    """Of one rank, from the first checkpoint on: what is written behind the steps. A copy from a GPU is page-locked, each
    flat fp32 vector of a group by itself."""
    cfg = settings.cfg
    if not cfg.checkpoint.asynchronous or not (cfg.checkpoint.every or cfg.checkpoint.final):
        return 0
    elements = states.trained_elements
    if machine.site.device == "cpu" or cfg.engine.offload_optimizer != "none" or not elements:
        return states.written
    whole, rest = divmod(elements, settings.sub_group)
    vectors = 3 if cfg.optim.name == "adamw" else 1
    groups = [settings.sub_group] * whole + [rest] * bool(rest)
    return max(states.written, vectors * sum(page_locked(4 * size) for size in groups))
