"""A forecast as text."""

from __future__ import annotations

from collections.abc import Sequence

from stack.plan.forecast import CATEGORIES, COMMUNICATION, GIB, OVERHEAD, Forecast
from stack.plan.levers import Lever
from stack.plan.search import Point
from stack.plan.verdict import Verdict

CONVENTIONS = (
    "MFU: 3 x forward FLOPs, causal pairs only, over the card's dense bf16 peak. HFU: with what memory levers compute again. "
    "Kernels' own recomputation of scores counts in neither."
)


def report(found: Verdict) -> str:
    """All that is known of one run."""
    parts = [head(found), memory_table(found), host_lines(found), time_lines(found), notes(found)]
    return "\n\n".join(part for part in parts if part)


def head(found: Verdict) -> str:
    run = found.forecast.run
    size = int(run["parameters"]) / 1e9
    lines = [
        f"{run['name']}: {run['model']} ({size:.2f} B parameters), {int(run['seq_len']):,} tokens a row, {run['ranks']} GPU(s), "
        f"sp {run['sp']}, dp {run['dp']}, ZeRO {run['stage']}, {run['layers']}, {run['attention']}",
        f"forecast by {found.forecast.tier} for site={run['site']}",
        "",
        f"verdict: {found.answer}",
    ]
    return "\n".join([*lines, *(f"  {reason}" for reason in found.reasons)])


def memory_table(found: Verdict) -> str:
    memory = found.forecast.memory
    peak = memory.peak
    parts = dict(peak.parts) | {COMMUNICATION: memory.communication_bytes, OVERHEAD: memory.overhead_bytes}
    lines = [f"memory of a GPU at the peak, GiB ({memory.where}, {peak.layer}: {peak.operation})"]
    lines += [
        f"  {name:<24}{parts[name] / GIB:>9.2f}" for name in CATEGORIES if parts.get(name, 0) >= GIB // 200
    ]
    lines += [f"  {'live tensors':<24}{peak.num_bytes / GIB:>9.2f}"]
    lines += [f"  {'all of the above':<24}{memory.needed_bytes / GIB:>9.2f}"]
    card = f" of {found.card_bytes / GIB:.1f}" if found.card_bytes else ""
    lines += [f"  {'need, with the margin':<24}{found.need_bytes / GIB:>9.2f}{card}"]
    phases = ", ".join(f"{name} {most.num_bytes / GIB:.2f}" for name, most in memory.phases.items())
    return "\n".join(
        [*lines, f"  live tensors by phase: {phases}; between steps {memory.states_bytes / GIB:.2f}"]
    )


def host_lines(found: Verdict) -> str:
    host, forecast = found.forecast.host, found.forecast
    parts = {
        "kept activations": host.kept_bytes,
        "optimizer": host.optimizer_bytes,
        "parameters": host.parameter_bytes,
        "copy of a checkpoint": host.checkpoint_copy_bytes,
        "process": host.buffer_bytes,
    }
    told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    there = f", of {found.host_bytes / GIB:,.1f}" if found.host_bytes else ", of an amount that is not known"
    lines = [
        f"host memory, GiB: {host.rank_bytes / GIB:.1f} a rank ({told}), {host.node_bytes / GIB:.1f} a node of "
        f"{host.ranks_a_node} rank(s){there}"
    ]
    for place, size in (("memory.spill_folder", host.spilled_bytes), ("engine.nvme_path", host.nvme_bytes)):
        if size:
            lines.append(f"  in {place} {size * host.ranks_a_node / GIB:.1f} GiB a node")
    return "\n".join([*lines, f"disk: {forecast.checkpoint_bytes / GIB:.1f} GiB a checkpoint"])


def time_lines(found: Verdict) -> str:
    forecast = found.forecast
    time, flops, ranks = forecast.time, forecast.flops, int(forecast.run["ranks"])
    moved = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in forecast.communication.items()) or "none"
    traffic = f"communication of a rank and step, GiB: {moved}; to and from the host {forecast.host_traffic_bytes / GIB:.2f}"
    if not time.seconds:
        return traffic
    lines = [f"step: {duration(time.seconds)} ({duration(time.low)} to {duration(time.high)})"]
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in time.parts.items() if seconds >= 0.005)
    lines.append(f"  seconds: {parts}")
    if time.hidden:
        hidden = ", ".join(f"{name} {seconds:.2f}" for name, seconds in time.hidden.items())
        lines.append(f"  hidden behind computation: {hidden}")
    peak = forecast.constants["peak_tflops"].value * 1e12 * ranks * time.seconds
    lines.append(
        f"  {forecast.tokens_a_step / time.seconds:,.0f} tokens/s, MFU {flops.model / peak:.1%}, HFU {flops.hardware / peak:.1%}"
    )
    lines.append(traffic)
    if forecast.steps is not None:
        total = time.seconds * forecast.steps
        hours = total * ranks / 3600
        lines.append(f"whole run: {forecast.steps} steps, {duration(total)}, {hours:,.1f} GPU-hours")
    else:
        lines.append("whole run: not known before the text is prepared, as schedule.epochs counts its steps")
    return "\n".join(lines)


def notes(found: Verdict) -> str:
    forecast = found.forecast
    lines = [CONVENTIONS] if forecast.time.seconds else []
    lines += [f"assumed: {text}" for text in forecast.assumptions]
    lines += [f"not modelled: {text}" for text in forecast.not_modelled]
    sources: dict[str, list[str]] = {}
    for name, constant in forecast.constants.items():
        sources.setdefault(constant.source, []).append(f"{name} {constant.value:g} {constant.unit}")
    lines += [f"{source}: {', '.join(names)}" for source, names in sources.items()]
    return "\n".join(lines)


def lever_table(levers: Sequence[Lever], title: str) -> str:
    """One a line, with what it saves and costs."""
    lines = [f"{title:<62}{'GiB saved':>10}{'s a step':>10}{'s a GiB':>9}{'node GiB':>10}"]
    for lever in levers:
        price = f"{lever.price:>9.2f}" if lever.saved_gib > 0 else f"{'':>9}"
        lines.append(
            f"  {lever.overrides:<60}{lever.saved_gib:>10.2f}{lever.seconds:>+10.2f}{price}{lever.host_gib:>+10.1f}"
        )
    return "\n".join(lines)


def stacked_lines(stacked: Sequence[Lever], enough: bool) -> str:
    """The levers together, to paste."""
    if not stacked:
        return ""
    together = " ".join(lever.overrides for lever in stacked)
    last = stacked[-1].found
    told = "makes it fit" if enough else "is not enough"
    return f"together {told} ({last.need_bytes / GIB:.1f} GiB, {last.answer}):\n  {together}"


def point_table(points: Sequence[Point]) -> str:
    """Of a search."""
    lines = [f"{'':<34}{'verdict':>14}{'live GiB':>10}{'need GiB':>10}{'node GiB':>10}{'step':>12}"]
    for point in points:
        forecast = point.found.forecast
        seconds = duration(forecast.time.seconds) if forecast.time.seconds else "not known"
        lines.append(
            f"{point.label:<34}{point.found.answer:>14}{forecast.memory.peak.num_bytes / GIB:>10.2f}"
            f"{point.found.need_bytes / GIB:>10.2f}{forecast.host.node_bytes / GIB:>10.1f}{seconds:>12}"
        )
    return "\n".join(lines)


def tier_lines(closed: Forecast, exact: Forecast, apart: float) -> str:
    """The peaks of both tiers by phase."""
    lines = [f"{'live tensors, GiB':<20}{'closed form':>13}{'exact count':>13}{'apart':>9}"]
    for name, most in exact.memory.phases.items():
        mine = closed.memory.phases.get(name)
        if mine is not None and most.num_bytes:
            lines.append(
                f"{name:<20}{mine.num_bytes / GIB:>13.2f}{most.num_bytes / GIB:>13.2f}"
                f"{mine.num_bytes / most.num_bytes - 1:>+9.1%}"
            )
    told = "the exact count is believed" if abs(apart) > 0.03 else "they agree"
    return "\n".join([*lines, f"peaks are {apart:+.1%} apart: {told}"])


def duration(seconds: float) -> str:
    """`380 s`, `2.1 h`."""
    if seconds >= 36_000:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2f} s"
