"""Measures the constants of this machine that a forecast has to assume: `launch/plan.py probe=true`.

Matrix products and attention in the shapes of the model that is asked for, copies between device and host, the device's and
the host's memory, collectives between ranks, and on a GPU what CUDA and NCCL take for themselves. A minute or two. Under a
launcher (deepspeed, torchrun, srun) on its ranks; else on ranks of its own: one a GPU, or two on the CPU. All ranks measure
at once, as they do in a step, and the slowest counts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from stack.bench.calls import clock, clock_attention, clock_products, settle, time_runs
from stack.config import derive
from stack.config.compose import compose_config
from stack.config.schema import RunConfig
from stack.dist.env import RankEnv, read_rank_env
from stack.dist.topology import Topology, init_topology, select_device
from stack.models.build import DTYPES
from stack.plan.calibration import calibration_line
from stack.plan.command import read_arguments
from stack.plan.forecast import GIB

TRIES = 5
"""Of each measurement; their median counts."""

REPEATS = 4
"""Of a collective in one try."""

ATTENTION_UNITS = 3
"""Forward and backward in FLOPs of a forward, by the convention of `models/flops.py`."""


@dataclass(frozen=True)
class Sizes:
    """tokens, seq: of products and of attention. buffer_bytes: of copies and collectives, of each rank."""

    tokens: int
    seq: int
    buffer_bytes: int


ON_GPU, ON_CPU = Sizes(8192, 32768, GIB), Sizes(1024, 1024, 32 << 20)


@dataclass(frozen=True)
class Found:
    """One constant of `SiteConfig`, or another quantity."""

    constant: str
    value: float
    unit: str
    measured: str
    assumed: float | None = None


def probe_command(arguments: Sequence[str]) -> None:
    """What `launch/plan.py probe=true` does. `calibration=FILE` says where the constants go."""
    request = read_arguments(arguments)
    cfg = compose_config(request.overrides, strict=False)
    file = Path(request.words.get("calibration", "calibration.jsonl")).expanduser().resolve()
    os.environ["DS_ACCELERATOR"] = device = _device(cfg)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        _probe_rank(0, cfg, file, device)
        return
    world = int(request.words.get("gpus", 0)) or (torch.cuda.device_count() if device == "cuda" else 2)
    # The ranks meet in a store of this process, on a port of the system's choice.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    spawn(_probe_spawned, (cfg, file, device), nprocs=world)


def _device(cfg: RunConfig) -> str:
    if cfg.site.device != "auto":
        return cfg.site.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _probe_spawned(rank: int, cfg: RunConfig, file: Path, device: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    _probe_rank(rank, cfg, file, device)


def _probe_rank(rank: int, cfg: RunConfig, file: Path, device: str) -> None:
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated")
    env = read_rank_env(os.environ)
    outside = _outside_bytes(env, device)
    topology = init_topology(env, env.world, device, cfg.engine.timeout_s)
    tell = print if topology.is_main else _silent
    found = probe(cfg, topology, env.local_world, outside, ON_GPU if device == "cuda" else ON_CPU, tell)
    if topology.is_main:
        name = torch.cuda.get_device_name(topology.device) if device == "cuda" else "cpu"
        _write(found, file, name, topology.world)
        print(f"written: {file}; use it with launch/plan.py calibration={file} or plan.calibration={file}")
    topology.close()


def _write(found: Sequence[Found], file: Path, device: str, ranks: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        for one in found:
            lines.write(
                calibration_line(one.constant, one.value, one.unit, one.measured, one.assumed, device, ranks)
            )


def _silent(text: str) -> None: ...


def _outside_bytes(env: RankEnv, device: str) -> int:
    """What the process takes of a card beside torch's allocator: before anything else, CUDA's context."""
    if device != "cuda":
        return 0
    torch.empty(1, device=select_device(env, device))
    return _outside_now()


def _outside_now() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def probe(
    cfg: RunConfig,
    topology: Topology,
    local_world: int,
    outside_bytes: int,
    sizes: Sizes,
    tell: Callable[[str], None],
) -> list[Found]:
    """Collective. outside_bytes: of the card, before the process groups were used. tell: takes each result as a line."""
    found = []
    parts = (
        _computing(cfg, topology, sizes),
        _copying(cfg, topology, local_world, sizes),
        _communicating(cfg, topology, local_world, outside_bytes, sizes),
    )
    for part in parts:
        for one in part:
            found.append(one)
            beside = "" if one.assumed is None else f" (assumed {one.assumed:.4g})"
            tell(f"{one.constant:<20}{one.value:>10.4g} {one.unit:<17}{one.measured}{beside}")
    return found


def _computing(cfg: RunConfig, topology: Topology, sizes: Sizes) -> Iterator[Found]:
    fields, site = derive.architecture(cfg.model), cfg.site
    hidden, wide = fields.get("hidden_size", 4096), fields.get("intermediate_size", 12288)
    heads = fields.get("num_attention_heads", 32)
    kv_heads, dim = fields.get("num_key_value_heads") or heads, fields.get("head_dim") or hidden // heads
    dtype, device = DTYPES[cfg.engine.precision], topology.device
    rate = _slowest(topology, lambda: clock_products(sizes.tokens, hidden, wide, dtype, device))
    products = f"products of {sizes.tokens} tokens, {hidden} x {wide}, {cfg.engine.precision}"
    peak = site.peak_tflops
    if peak is None:
        peak = rate / 1e12
        yield Found("peak_tflops", peak, "TFLOPS", f"{products}: the peak is not known, so what they reach")
    yield Found("gemm_share", rate / peak / 1e12, "of the peak", products, site.gemm_share)
    local, kv_local = max(1, heads // cfg.parallel.sp), max(1, kv_heads // cfg.parallel.sp)
    flops = 4.0 * local * dim * sizes.seq**2 / 2 * ATTENTION_UNITS

    def attention_rate() -> float:
        return flops / sum(clock_attention(1, local, kv_local, sizes.seq, dim, dtype, device))

    rate = _slowest(topology, attention_rate)
    words = f"sdpa forward and backward, {local} heads, {sizes.seq} tokens"
    yield Found("attention_share", rate / peak / 1e12, "of the peak", words, site.attention_share)


def _copying(cfg: RunConfig, topology: Topology, local_world: int, sizes: Sizes) -> Iterator[Found]:
    site, device, size = cfg.site, topology.device, sizes.buffer_bytes
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    rate = _slowest(topology, lambda: 2 * size / clock(lambda: target.copy_(source), device))
    words = f"a copy of {size >> 20} MiB, read and written"
    peak = site.memory_tb_s
    if peak is None:
        peak = rate / 1e12
        yield Found("memory_tb_s", peak, "TB/s", f"{words}: the peak is not known, so what it reaches")
    yield Found("memory_share", rate / peak / 1e12, "of the peak rate", words, site.memory_share)
    pinned = device.type == "cuda"
    host, other = (torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    to_host = _slowest(topology, lambda: size / clock(lambda: host.copy_(source), device))
    to_device = _slowest(topology, lambda: size / clock(lambda: target.copy_(host), device))
    words = f"{size >> 20} MiB, all ranks at once, the slower way of both"
    yield Found("host_link_gb_s", min(to_host, to_device) / 1e9, "GB/s", words, site.host_link_gb_s)
    rate = local_world * _slowest(
        topology, lambda: 2 * size / clock(lambda: other.copy_(host), torch.device("cpu"))
    )
    words = f"{size >> 20} MiB on the host by each of {local_world} rank(s), read and written"
    yield Found("host_memory_gb_s", rate / 1e9, "GB/s a node", words, site.host_memory_gb_s)


def _communicating(
    cfg: RunConfig, topology: Topology, local_world: int, outside_bytes: int, sizes: Sizes
) -> Iterator[Found]:
    """On a GPU also what the libraries take: untested where there is none."""
    site, world, device = cfg.site, topology.world, topology.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        measured = "card in use before any collective, less what torch reserved"
        yield Found("context_gib", outside_bytes / GIB, "GiB", measured, site.context_gib)
    if world == 1:
        return
    whole = torch.empty(sizes.buffer_bytes // world * world, dtype=torch.uint8, device=device)
    other, part = torch.empty_like(whole), whole.chunk(world)[topology.rank].clone()
    moved = whole.numel() * (world - 1) / world

    def timed(collective: Callable[[], Any]) -> float:
        return _slowest(topology, lambda: moved * REPEATS / _repeated(collective, device))

    # What the kernels above brought with them, as cuBLAS, is no communicator's.
    kernels = _outside_now() if on_gpu else 0
    gather = timed(lambda: dist.all_gather_into_tensor(whole, part))
    before = _outside_now() if on_gpu else 0
    exchange = timed(lambda: dist.all_to_all_single(other, whole))
    behind = _outside_now() if on_gpu else 0
    spans = world > local_world
    constant, assumed = ("network_gb_s", site.network_gb_s) if spans else ("link_gb_s", site.link_gb_s)
    words = f"{whole.numel() >> 20} MiB over {world} ranks: all-gather {gather / 1e9:.3g}, all-to-all {exchange / 1e9:.3g}"
    yield Found(constant, min(gather, exchange) / 1e9, "GB/s", words, assumed)
    if on_gpu:
        words = "more of the card in use behind the first all-gather"
        yield Found("communicator_gib", max(0, before - kernels) / GIB, "GiB", words, site.communicator_gib)
        words = "more behind the first all-to-all, for each other rank"
        a_peer = max(0, behind - before) / GIB / (min(world, local_world) - 1 or 1)
        yield Found("exchange_gib", a_peer, "GiB a peer", words, site.exchange_gib)


def _repeated(collective: Callable[[], Any], device: torch.device) -> float:
    """Seconds of `REPEATS` of them, behind one untimed: as many on every rank, or they would wait for each other forever."""
    collective()
    return time_runs(collective, REPEATS, device)


def _slowest(topology: Topology, rate: Callable[[], float]) -> float:
    """The median of some tries on the rank where it is least. Every rank begins each try together."""
    tries = []
    for _ in range(TRIES):
        topology.barrier()
        tries.append(rate())
        settle(topology.device)
    return min(topology.gather_objects(sorted(tries)[TRIES // 2]))
