"""The numbers of a step, each with its unit in its name; every hook gets the same ones.

Utilisation follows PaLM, appendix B, made exact for packed documents. Model FLOPs of a step are three times the forward
pass (one forward, two for backward), with attention counted over the causal pairs of each document; MFU divides them by
step time, ranks and the device's dense bf16 peak. HFU counts what is computed again in backward as well, so it shows how
busy the device is while MFU shows how much of that is of use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil
import torch

from stack.checkpoint.state import TrainState
from stack.data.batch import MicroBatch
from stack.dist.topology import Topology

GIB = 1024**3

# Dense bf16 TFLOPS without sparsity, from the vendors' data sheets. The first entry whose words are all in the device's
# name counts.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "MI300X": 1307.4,
}


def device_peak_tflops(device: torch.device, given: float | None) -> float | None:
    """`site.peak_tflops`, or the peak of a known device, or None: then no MFU is shown."""
    if given is not None or device.type != "cuda":
        return given
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    return next((peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.split())), None)


@dataclass
class FlopCounter:
    """How many floating-point operations a micro-batch takes, for its document lengths."""

    model: Callable[[list[int]], float]
    hardware: Callable[[list[int]], float]
    peak_tflops: float
    """Of one device."""


@dataclass
class StepCounts:
    """What one step reads, over all micro-batches and data-parallel ranks; rows shared by ranks count once."""

    targets: int
    tokens: int
    rows: int
    model_flops: float = 0.0
    hardware_flops: float = 0.0
    wishes: int = 0
    """Ranks that have been asked to stop the run."""
    data_wait_s: float = 0.0
    """How long the rank that waited longest waited for its rows."""


@dataclass
class Step:
    """The numbers of one step, the same on every rank but for the times."""

    lr: float
    counts: StepCounts
    loss: float | None = None
    """Mean over the step's targets of all ranks, in nats; None without a target."""
    grad_norm: float | None = None
    """Before clipping."""
    clipped: bool = False
    loss_scale: float | None = None
    skipped: str | None = None
    """Why the weights were left alone: `no targets`, `loss-scale`, `spike ...`, `passed over`, or `nonfinite ...` with the
    place."""
    times_s: dict[str, float] = field(default_factory=dict)
    stop: bool = False
    """The ranks agree that the run stops behind this step."""


class Stopwatch:
    """Times of the parts of a step. A lap waits for the device, so it belongs where the numbers are read anyway."""

    def __init__(self, device: torch.device):
        self.device, self._laps, self._last = device, {}, time.perf_counter()

    def lap(self, name: str) -> None:
        """End the part `name` here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now

    def since_start_s(self) -> float:
        """Seconds since the last lap, or since the start."""
        return time.perf_counter() - self._last

    def laps(self) -> dict[str, float]:
        """Seconds of each part, and their sum as `step_s`."""
        return {**self._laps, "step_s": sum(self._laps.values())}


def memory_gib(device: torch.device) -> dict[str, float]:
    """Of this rank, in GiB: device memory allocated at most and reserved now, and the process's own host memory."""
    numbers = {"host_rss_gib": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        numbers["memory_allocated_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        numbers["memory_reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
    return numbers


@dataclass
class Meter:
    """Turns a step into the record that hooks get: see `plain`."""

    topology: Topology
    flops: FlopCounter | None

    def record(self, state: TrainState, step: Step) -> dict[str, Any]:
        """One flat dict; `step` counts finished steps, so the first is 1."""
        counts, seconds = step.counts, step.times_s["step_s"]
        numbers: dict[str, Any] = {
            "step": state.step,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "clipped": step.clipped,
            "lr": step.lr,
            "skipped": step.skipped,
            "rows": counts.rows,
            "targets": counts.targets,
            "tokens": counts.tokens,
            "targets_total": state.targets,
            "tokens_total": state.tokens,
            "tokens_per_s": counts.tokens / seconds,
            "tokens_per_s_per_rank": counts.tokens / seconds / self.topology.world,
            "skipped_steps": state.skipped_steps,
            "overflow_steps": state.overflow_steps,
            "empty_steps": state.empty_steps,
            "small_steps": state.small_steps,
            "dropped_steps": state.dropped_steps,
            **step.times_s,
            "data_wait_s": counts.data_wait_s,
            **memory_gib(self.topology.device),
        }
        if step.loss_scale is not None:
            numbers["loss_scale"] = step.loss_scale
        if self.flops is not None:
            peak = self.flops.peak_tflops * 1e12 * self.topology.world * seconds
            numbers["mfu"] = counts.model_flops / peak
            numbers["hfu"] = counts.hardware_flops / peak
        return plain(numbers)


def plain(numbers: dict[str, Any]) -> dict[str, Any]:
    """NaN and inf as None: JSON has no word for them, and W&B and plots leave a gap."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }


def count_step(
    method: Any,
    micro_batches: Sequence[MicroBatch],
    topology: Topology,
    flops: FlopCounter | None = None,
    wish: bool = False,
    wait_s: float = 0.0,
) -> StepCounts:
    """Collective: what all ranks read in this step. The ranks of a sequence-parallel group hold slices of the same rows.

    wish: this rank has been asked to stop the run; the count of those travels along. wait_s: how long this rank waited for
    its rows; each rank's travels along in a place of its own.
    """
    own = micro_batches if topology.sp_rank == 0 else ()  # tokens and rows are those of whole rows
    lengths = [document_lengths(batch) for batch in own]
    waits_us = [0] * topology.world
    waits_us[topology.rank] = round(wait_s * 1e6)
    targets, tokens, rows, wishes, *waits_us = topology.sum_each(
        [
            sum(method.count_targets(batch) for batch in micro_batches),
            sum(sum(batch.row_tokens) for batch in own),
            sum(tokens > 0 for batch in own for tokens in batch.row_tokens),
            int(wish),
            *waits_us,
        ]
    )
    counts = StepCounts(targets, tokens, rows, wishes=wishes, data_wait_s=max(waits_us) / 1e6)
    if flops is not None:
        counts.model_flops, counts.hardware_flops = topology.sum_each(
            [float(sum(map(flops.model, lengths))), float(sum(map(flops.hardware, lengths)))]
        )
    return counts


def document_lengths(batch: MicroBatch) -> list[int]:
    """Tokens of each piece of a document in whole rows, padding left out."""
    bounds = batch.cu_seqlens.tolist()
    seq = bounds[-1] // len(batch.input_ids)  # of a whole row
    return [end - begin for begin, end in pairwise(bounds) if begin % seq < batch.row_tokens[begin // seq]]
