"""The forecast of a run beside the run: what it needs is said and judged before a device is touched, and compared with what
was measured once its steps are warm.

Nothing here can end a run but the refusal itself. What is not known, an unknown model or card or a fault of the forecast's
own, is said once, and the run goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stack.config.schema import RunConfig
from stack.config.schema_site import SiteConfig
from stack.data.store import TokenStore
from stack.dist.env import RankEnv
from stack.dist.host_memory import host_memory
from stack.dist.topology import Topology
from stack.errors import ConfigError, ForecastRefusal
from stack.plan.changes import Changes, as_overrides
from stack.plan.forecast import GIB
from stack.plan.levers import Lever, Run, stack_levers, try_levers
from stack.plan.machine import Machine, read_machine
from stack.plan.verdict import NO, Verdict

SAMPLE = 4096
"""Documents of each store whose lengths are looked at."""

LEVERS = 5
"""Levers named in a refusal."""


@dataclass
class Outlook:
    """What is known before the run. found: None where nothing is; remark: why, or what else is to be said."""

    run: Run | None = None
    found: Verdict | None = None
    remark: str = ""

    @property
    def machine(self) -> Machine | None:
        return None if self.run is None else self.run.machine

    @property
    def checkpoint_copy_bytes(self) -> int:
        """Of one rank, in host memory, from the first checkpoint on; 0 where nothing is known."""
        return 0 if self.found is None else self.found.forecast.host.checkpoint_copy_bytes


def look_ahead(cfg: RunConfig, env: RankEnv, device: str) -> Outlook:
    """The forecast of this run on this machine, in under a second. Every rank asks for itself, and all get the same.

    Raises ForecastRefusal under `plan.gate=refuse` where it cannot fit, and ConfigError for a wrong `plan.calibration`.
    """
    if cfg.plan.gate == "off":
        return Outlook()
    machine = read_machine(_site_here(cfg, env, device), cfg.plan.calibration)
    try:
        run = Run(replace(cfg, site=machine.site), env.world, machine, None)
        found = run.plan()
        refusal = _refusal(run, found) if found.answer == NO else ""
    except ConfigError as error:
        return Outlook(remark="forecast: not modelled: " + "; ".join(fault.want for fault in error.faults))
    except Exception:  # noqa: BLE001  a fault of the forecast's own must not end a run
        return Outlook(remark=_failed())
    if found.refuses(cfg.plan.gate) and refusal:
        raise ForecastRefusal(refusal)
    return Outlook(run, found, f"warning: {refusal}" if refusal else "")


def _failed() -> str:
    return f"forecast: failed, the run goes on without it:\n{traceback.format_exc().rstrip()}"


def with_documents(outlook: Outlook, stores: Sequence[TokenStore]) -> Outlook:
    """The same for documents as long as those that were prepared: attention's time grows with their square. The length taken
    is the one at which rows of equal documents cost what the rows of these do."""
    if outlook.run is None or outlook.found is None:
        return outlook
    try:
        run = replace(outlook.run, documents=(_typical_length(stores, outlook.run.cfg.data.seq_len),))
        return replace(outlook, run=run, found=run.plan())
    except Exception:  # noqa: BLE001  as above
        return Outlook(remark=_failed())


def _typical_length(stores: Sequence[TokenStore], seq: int) -> int:
    """Tokens."""
    lengths = np.concatenate([_some_lengths(store) for store in stores]).clip(1, seq).astype(np.float64)
    return max(1, round(float((lengths**2).sum() / lengths.sum())))


def _some_lengths(store: TokenStore) -> np.ndarray:
    """Of up to `SAMPLE` documents, spread over the store, int64."""
    step = max(1, store.num_documents // SAMPLE)
    places = np.arange(0, store.num_documents, step)
    return np.asarray(store.offsets[places + 1]) - np.asarray(store.offsets[places])


def _site_here(cfg: RunConfig, env: RankEnv, device: str) -> SiteConfig:
    """The site, with what this node says of itself where the settings do not."""
    site = replace(cfg.site, device="cpu" if device == "cpu" else "cuda")
    if device == "cpu":
        return site
    if site.memory_gib is None and torch.cuda.device_count() > 0:
        # Reads the driver; nothing is allocated.
        index = min(env.local_rank, torch.cuda.device_count() - 1)
        site = replace(site, memory_gib=torch.cuda.get_device_properties(index).total_memory / GIB)
    if site.gpus_a_node is None:
        site = replace(site, gpus_a_node=env.local_world)
    if site.host_memory_gib is None and (there := host_memory()) is not None:
        site = replace(site, host_memory_gib=there.total / GIB)
    return site


def _refusal(run: Run, found: Verdict) -> str:
    """Numbers and levers."""
    memory = found.forecast.memory
    peak = memory.peak
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:4]
    made_of = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    lines = [f"this run does not fit: {'; '.join(found.reasons)}"]
    lines.append(
        f"  live tensors {peak.num_bytes / GIB:.1f} GiB at most, in the {memory.where} ({made_of}); host "
        f"{found.forecast.host.rank_bytes / GIB:.1f} GiB a rank, {found.forecast.host.node_bytes / GIB:.1f} a node"
    )
    ranked = try_levers(run, found)
    stacked = stack_levers(run, found, ranked)
    fits = bool(stacked) and stacked[-1].found.answer != NO
    lines += list(_lever_lines(ranked))
    together = _in_words(tuple(pair for lever in stacked for pair in lever.changes))
    fix = f"{together} together fit" if fits else "more GPUs, a larger card, or a shorter data.seq_len"
    lines.append(f"Fix: {fix}; plan.gate=warn tries it all the same. The forecast in full: launch/plan.py")
    return "\n".join(lines)


def _in_words(changes: Changes) -> str:
    """As overrides of this command; more ranks are the launcher's to start."""
    settings = as_overrides(tuple(pair for pair in changes if pair[0] != "gpus"))
    ranks = [f"{value} ranks" for key, value in changes if key == "gpus"]
    return " on ".join([text for text in (settings, *ranks) if text])


def _lever_lines(levers: list[Lever]) -> Iterator[str]:
    for lever in levers[:LEVERS]:
        seconds = f", {lever.seconds:+.1f} s a step" if lever.seconds else ""
        yield f"  {_in_words(lever.changes)}: {lever.saved_gib:.1f} GiB a GPU less{seconds}"


def announce(
    outlook: Outlook, stores: Sequence[TokenStore], topology: Topology, tell: Callable[[str], None]
) -> Outlook:
    """What a person sees at the start, on rank 0. Returns the outlook for the documents of these stores."""
    if topology.is_main:
        outlook = with_documents(outlook, stores)
        for line in describe(outlook):
            tell(line)
    return outlook


def describe(outlook: Outlook) -> Iterator[str]:
    """The outlook in a few lines."""
    if outlook.remark:
        yield outlook.remark
    if outlook.found is None:
        return
    found, forecast = outlook.found, outlook.found.forecast
    memory, time = forecast.memory, forecast.time
    text = (
        f"forecast: live tensors {size(memory.peak.num_bytes)} a rank at most, in the {memory.where}; "
        f"{size(memory.states_bytes)} between steps"
    )
    if found.card_bytes:
        text += f"; need {size(found.need_bytes)} of {size(found.card_bytes)}: {found.answer}"
    if forecast.host.kept_bytes:
        text += f"; host {size(forecast.host.kept_bytes)} kept a rank"
    if time.seconds:
        text += f"; a step {time.seconds:.3g} s ({time.low:.3g} to {time.high:.3g})"
    yield text
    unknown = list(forecast.not_modelled)
    if not found.card_bytes and outlook.machine is not None and outlook.machine.site.device == "cpu":
        unknown.insert(0, "whether it fits: this is the CPU, whose memory others use too")
    if unknown:
        yield f"forecast, not modelled: {'; '.join(unknown)}"


def size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
