"""How long a step takes: FLOPs and bytes over the rates that a machine reaches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from stack.config.model_checks import KEEPS_SCORES
from stack.models.flops import forward_flops, hardware_flops, model_flops
from stack.plan.forecast import Flops, StepTime
from stack.plan.machine import Machine
from stack.plan.settings import Settings
from stack.plan.states import States
from stack.plan.traffic import Traffic

SPREAD = {
    "attention": 0.10,
    "GEMM": 0.15,
    "memory-bound": 0.40,
    "communication": 0.50,
    "offload": 0.50,
    "optimizer": 0.50,
}
"""Share by which a part may be off, assumed: of published step times (tests/plan) half lie within 5 %, all but one in 25
within 20 %, and attention is most of them. Halved for a machine whose constants were measured."""

HIDES = 0.9
"""Share of computation that gathers and reductions on their own stream can run behind."""


@dataclass(frozen=True)
class Work:
    """FLOPs of one rank and step."""

    attention: float
    gemm: float


def count_flops(settings: Settings) -> Flops:
    """Of one optimizer step, all ranks. Conventions: `stack/models/flops.py`."""
    memory, shape = settings.cfg.memory, cast(Any, settings.shape)
    rows = settings.dp * settings.cfg.engine.accumulation
    forward = forward_flops(shape, settings.documents)
    hardware = hardware_flops(
        shape,
        settings.documents,
        checkpointing=memory.checkpointing == "full",
        tiled_mlp=memory.tiled_mlp,
        lean=settings.lean,
    )
    again = settings.lean is False and memory.checkpointing == "full"
    return Flops(
        model=float(rows * model_flops(shape, settings.documents)),
        hardware=float(rows * hardware),
        attention=float(rows * forward.attention * (4 if again else 3)),
    )


def step_time(
    settings: Settings, machine: Machine, flops: Flops, traffic: Traffic, states: States
) -> StepTime:
    """Empty where the machine's rates are not known."""
    if machine.missing(settings.world):
        return StepTime()
    work, world = _work(settings, flops), settings.world
    site = machine.site
    peak = machine.rate("peak_tflops")
    share = (
        site.attention3_share if settings.cfg.model.attention == "flash_attention_3" else site.attention_share
    )
    parts = {
        "attention": work.attention / (peak * share),
        "GEMM": work.gemm / (peak * site.gemm_share),
        "memory-bound": _element_wise_bytes(settings) / (machine.rate("memory_tb_s") * site.memory_share),
    }
    computing = sum(parts.values())
    hidden = {}
    exchange = traffic.exchange_bytes / _link(machine, settings.cfg.parallel.sp)
    gather = (traffic.gathered_bytes + traffic.reduced_bytes) / _link(machine, world)
    seen = max(0.0, gather - HIDES * computing)
    parts["communication"] = exchange + seen
    hidden["gathers and reductions"] = gather - seen
    parts["offload"], hidden["kept activations"] = _offload(settings, machine, traffic, computing)
    parts["optimizer"] = _optimizer(settings, machine, states, traffic)
    spread = 0.5 if machine.rates_measured else 1.0
    total = sum(parts.values())
    off = spread * math.sqrt(sum((SPREAD[name] * seconds) ** 2 for name, seconds in parts.items()))
    return StepTime(
        seconds=total,
        low=max(0.0, total - off),
        high=total + off + 0.1 * sum(hidden.values()),
        parts=parts,
        hidden={name: seconds for name, seconds in hidden.items() if seconds},
    )


def _work(settings: Settings, flops: Flops) -> Work:
    """What kernels run: attention's backward takes 2.5 forwards, as it computes the scores again."""
    again = settings.cfg.memory.checkpointing == "full" and not settings.lean
    attention = flops.attention * (4.5 / 4 if again else 3.5 / 3)
    # Others run forward again for their log-sum-exp.
    if settings.lean and settings.work.attention not in KEEPS_SCORES:
        attention += flops.attention / 3
    return Work(attention / settings.world, (flops.hardware - flops.attention) / settings.world)


def _element_wise_bytes(settings: Settings) -> float:
    """Read and written by norms, rotary embedding, activations and residuals in a step of one rank.

    Counted from the operators of `operators.py` and `blocks.py`, forward and backward, in bytes of 16-bit tensors: a fused
    norm reads and writes 2 + 5 of them, an unfused one 17 + 43; two of hidden states and those of q and k a layer; rotary
    embedding 9 + 14 of q and k, residuals 3 + 1 of hidden states; SwiGLU 5 + 8 of the MLP's width, exchanges 4 copies of
    attention's tensors each way.
    """
    shape, work, memory = settings.shape, settings.work, settings.cfg.memory
    again = 2 if settings.lean or memory.checkpointing == "full" else 1
    forward, back = (2, 5) if settings.fused_norms else (17, 43)
    norms = 2 * work.hidden + ((work.query + work.key) if shape.head_norms else 0)
    width = work.tokens * work.width * shape.intermediate * max(1, shape.experts_per_token)
    heads = work.query + work.key
    exchanged = 4 * (2 * work.query + 2 * work.key_spread) if work.sp > 1 else 0
    once = forward * norms + 9 * heads + 3 * work.hidden + 5 * width + exchanged
    backward = back * norms + 14 * heads + work.hidden + 8 * width + exchanged
    layers = shape.num_layers * (again * once + backward)
    logits = 4 * work.tokens * shape.vocab * (6 if memory.tiled_loss else 10)
    return settings.cfg.engine.accumulation * (layers + logits)


def _link(machine: Machine, ranks: int) -> float:
    """Bytes a second of a collective over so many ranks."""
    site = machine.site
    if ranks <= (site.gpus_a_node or ranks) and site.link_gb_s is not None:
        return machine.rate("link_gb_s")
    return machine.rate("network_gb_s") if site.network_gb_s is not None else math.inf


def _offload(settings: Settings, machine: Machine, traffic: Traffic, computing: float) -> tuple[float, float]:
    """(seconds that the step waits, seconds that run beside computation). Lean layers copy on a stream of their own;
    checkpoints are copied on the stream that computes."""
    seconds = traffic.host_bytes / machine.rate("host_link_gb_s")
    if not seconds:
        return 0.0, 0.0
    if not settings.lean:
        return seconds, 0.0
    # Out during forward, a third of the computation, and back during the rest.
    waits = max(0.0, seconds / 2 - computing / 3) + max(0.0, seconds / 2 - computing * 2 / 3)
    spilled = traffic.spilled_bytes * settings.cfg.engine.accumulation
    if spilled and machine.site.disk_gb_s is not None:
        ranks = min(settings.world, machine.site.gpus_a_node or settings.world)
        disk = 2 * spilled * ranks / machine.rate("disk_gb_s")
        waits = max(waits, disk - computing)
        seconds = max(seconds, disk)
    return waits, seconds - waits


def _optimizer(settings: Settings, machine: Machine, states: States, traffic: Traffic) -> float:
    """Adam reads weights, gradients and both moments and writes all but the gradients, in fp32."""
    moved = 28 * states.trained_elements
    if settings.cfg.engine.offload_optimizer == "none":
        return (moved + 8 * states.trained_elements) / (
            machine.rate("memory_tb_s") * machine.site.memory_share
        )
    ranks = min(settings.world, machine.site.gpus_a_node or settings.world)
    copies = traffic.optimizer_bytes / machine.rate("host_link_gb_s")
    if machine.site.host_memory_gb_s is None:
        return copies
    return copies + moved * ranks / machine.rate("host_memory_gb_s")
