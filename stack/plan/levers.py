"""Which settings would lower the peak, what each saves and costs: found by planning again, not by a formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stack.config.checks import check
from stack.config.schema import RunConfig
from stack.errors import ConfigError, Fault
from stack.plan.changes import Changes, as_overrides, changed
from stack.plan.closed_form import plan
from stack.plan.forecast import GIB
from stack.plan.machine import Machine
from stack.plan.verdict import CLOSE, FITS, NO, Verdict, verdict

LEAST_GIB = 0.05
"""What a lever must save to be worth a line."""

ELSEWHERE = ("data.path", "memory.spill_folder", "memory.fused_kernels", "checkpoint.weights_from")
"""Settings whose check looks at this machine, which need not be the one that trains."""


def faults_of(cfg: RunConfig, world: int) -> list[Fault]:
    """What launch/train.py would refuse on `world` ranks, but for what only the training machine knows."""
    return [fault for fault in check(cfg, world) if fault.key not in ELSEWHERE]


@dataclass(frozen=True)
class Run:
    """One run to be planned."""

    cfg: RunConfig
    world: int
    machine: Machine
    documents: tuple[int, ...] | None = None

    def plan(self, changes: Changes = ()) -> Verdict:
        """With changes; `gpus` among them is the number of ranks. Raises ConfigError, also for changes that a start would
        refuse: they are no use to anybody."""
        world = next((value for key, value in reversed(changes) if key == "gpus"), self.world)
        settings = tuple((key, value) for key, value in changes if key != "gpus")
        cfg = changed(self.cfg, settings)
        if changes and (faults := faults_of(cfg, world)):
            raise ConfigError(faults)
        return verdict(plan(cfg, world, self.machine, self.documents), self.machine)


@dataclass(frozen=True)
class Lever:
    """saved_gib: of the card's need, below 0 where it needs more; host_gib: of a node, more; seconds: more a step."""

    changes: Changes
    saved_gib: float
    host_gib: float
    seconds: float
    found: Verdict

    @property
    def overrides(self) -> str:
        return as_overrides(self.changes)

    @property
    def price(self) -> float:
        """Seconds a GiB saved."""
        return self.seconds / self.saved_gib


def try_levers(run: Run, before: Verdict) -> list[Lever]:
    """Each lever by itself, the cheapest first; those that save nothing are left out."""
    found = []
    for changes in levers_of(run):
        lever = _try(run, before, (), changes)
        if lever is not None and lever.saved_gib > LEAST_GIB:
            found.append(lever)
    return sorted(found, key=lambda lever: (lever.price, -lever.saved_gib))


def stack_levers(run: Run, before: Verdict, ranked: list[Lever]) -> list[Lever]:
    """One on top of another until it fits; each is planned anew on those before it. Empty if it fits or nothing helps."""
    if room_left(before):
        return []
    stacked: list[Lever] = []
    changes, now = (), before
    for lever in _by_need(run, before, ranked):
        if any(lever.changes[0][0] == key for key, _ in changes if key in ("gpus", "memory")):
            continue
        one = _try(run, now, changes, lever.changes)
        if one is None or not (one.saved_gib > LEAST_GIB or one.host_gib < -LEAST_GIB):
            continue
        changes, now = changes + lever.changes, one.found
        stacked.append(one)
        if room_left(now):
            return stacked
    return stacked


def room_left(found: Verdict) -> bool:
    """The device and the host have room, whether or not anything of this size has been proven. Of a card that is not known
    nothing better can be asked."""
    return found.answer != NO and (not found.card_bytes or found.need_bytes <= CLOSE * found.card_bytes)


def _by_need(run: Run, before: Verdict, ranked: list[Lever]) -> list[Lever]:
    """Cheap levers first, more GPUs last, as they are not a setting. Where the host has no room, first what relieves it."""
    host_full = any("host memory" in reason for reason in before.reasons) and before.answer != FITS
    relief = [_try(run, before, (), changes) for changes in _host_levers(run)] if host_full else []
    helping = [one for one in relief if one is not None and one.host_gib < 0]
    found = sorted(helping, key=lambda one: one.seconds) + ranked
    return sorted(found, key=lambda one: one.changes[0][0] == "gpus")


def _try(run: Run, before: Verdict, earlier: Changes, changes: Changes) -> Lever | None:
    try:
        found = run.plan(earlier + changes)
    except ConfigError:
        return None  # settings that do not go together are no lever
    was, now = before.forecast, found.forecast
    return Lever(
        changes,
        (before.need_bytes - found.need_bytes) / GIB,
        (now.host.node_bytes - was.host.node_bytes) / GIB,
        now.time.seconds - was.time.seconds,
        found,
    )


def levers_of(run: Run) -> Iterator[Changes]:
    """What is still off, or could be smaller."""
    cfg, memory, engine = run.cfg, run.cfg.memory, run.cfg.engine
    if not memory.lean:
        yield (("memory", "lean"),)
        if not (memory.tiled_mlp and memory.tiled_loss and memory.offload):
            yield (("memory", "alst"),)
        if not memory.tiled_loss:
            yield (("memory.tiled_loss", True),)
        if memory.checkpointing == "none":
            yield (("memory.checkpointing", "full"),)
        elif not memory.offload:
            yield (("memory.offload", True),)
        if not memory.tiled_mlp:
            yield (("memory.tiled_mlp", True),)
    if memory.tiled_loss and memory.loss_tile > 512:
        yield (("memory.loss_tile", max(512, memory.loss_tile // 4)),)
    if (memory.tiled_mlp or memory.lean) and memory.mlp_tile > 2048:
        yield (("memory.mlp_tile", max(2048, memory.mlp_tile // 4)),)
    if memory.lean and memory.attention_heads != 1:
        yield (("memory.attention_heads", 1),)
    if memory.fused_kernels == "none":
        yield (("memory.fused_kernels", "torch"),)
    if engine.stage == 3:
        bucket = "engine.overrides.zero_optimization.reduce_bucket_size"
        yield ((bucket, 10_000_000),)
        live = "engine.overrides.zero_optimization."
        yield ((f"{live}stage3_max_live_parameters", 100_000_000), (f"{live}stage3_max_reuse_distance", 0))
    yield from _state_levers(run)
    if cfg.data.micro_batch > 1:
        more = engine.accumulation * cfg.data.micro_batch
        yield (("data.micro_batch", 1), ("engine.accumulation", more))
    yield from _more_gpus(run)


def _state_levers(run: Run) -> Iterator[Changes]:
    engine = run.cfg.engine
    if engine.stage < 3:
        yield (("engine.stage", 3),)
    if engine.offload_optimizer == "none":
        yield (("engine.offload_optimizer", "cpu"),)
    elif engine.offload_param == "none" and engine.stage == 3:
        yield (("engine.offload_param", "cpu"),)


def _host_levers(run: Run) -> Iterator[Changes]:
    memory, engine = run.cfg.memory, run.cfg.engine
    if run.cfg.checkpoint.asynchronous:
        yield (("checkpoint.asynchronous", False),)
    if memory.lean:
        yield (("memory", "alst"),)
    if engine.offload_optimizer == "cpu":
        yield (("engine.offload_optimizer", "none"),)
    if memory.offload:
        yield (("memory.offload", False),)
    yield from _more_gpus(run)


def _more_gpus(run: Run) -> Iterator[Changes]:
    """Twice the GPUs: the row over twice as many, where the heads allow it, or twice the rows."""
    yield (("gpus", 2 * run.world), ("parallel.sp", 2 * run.cfg.parallel.sp))
    yield (("gpus", 2 * run.world),)
