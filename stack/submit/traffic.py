"""Two collectives on all ranks with their rates, the same within each node first, so that a bad node is told from a bad
fabric."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from stack.dist.env import RankEnv
from stack.dist.topology import select_device
from stack.submit.verdict import NotReady

REPEATS = 5
MIB = 1 << 20
SIZE = {"cpu": 4 * MIB, "cuda": 256 * MIB}
"""Bytes of each rank's buffer: enough to reach the fabric's rate, little enough to end soon over gloo."""


MEETING, WITHIN, REDUCE, EXCHANGE = (
    "meeting of all ranks",
    "all-reduce within each node",
    "all-reduce over all ranks",
    "all-to-all over all ranks",
)
STAGES = (MEETING, WITHIN, REDUCE, EXCHANGE)


def measure(
    store: dist.Store, env: RankEnv, nodes: Sequence[str], device: str, limit_s: float, left_s: float
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Collective. On rank 0 the rates in bytes a second: of the all-reduce within each node, and of each collective of all.

    limit_s: of the whole preflight, for the message. left_s: seconds after which rank 0 says which nodes are waited for, and
    every rank ends with code 1. Raises RuntimeError for wrong data, and torch's own errors.
    """
    guard = threading.Timer(left_s + 3 * bool(env.rank), give_up, (env, nodes, limit_s))
    guard.daemon = True
    guard.start()
    ranks = dist.PrefixStore("ranks", store)
    place = init(ranks, env, device, limit_s)

    def passed(stage: str) -> None:
        store.set(f"passed/{stage}/{env.rank}", "")

    passed(MEETING)
    size, own = SIZE[device], {}
    group = node_group(env.world, env.local_world, env.rank)
    if group is not None:
        rates: list[float] = [0.0] * env.world
        dist.all_gather_object(rates, all_reduce_rate(place, size, group))
        own = {
            node: min(rates[index * env.local_world :][: env.local_world]) for index, node in enumerate(nodes)
        }
    passed(WITHIN)
    found = {REDUCE: all_reduce_rate(place, size)}
    passed(REDUCE)
    found[EXCHANGE] = all_to_all_rate(place, size)
    passed(EXCHANGE)
    guard.cancel()
    dist.destroy_process_group()
    return (own, found) if env.rank == 0 else None


def give_up(env: RankEnv, nodes: Sequence[str], limit_s: float) -> None:
    """Rank 0 says which stage did not end, and on which nodes; then this rank ends, whatever comes in between."""
    try:
        if env.rank == 0:
            print(f"error: {NotReady([_where_it_stands(env, nodes, limit_s)])}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _where_it_stands(env: RankEnv, nodes: Sequence[str], limit_s: float) -> str:
    # A connection of its own: the main thread may hold the lock of the other while it waits.
    store = dist.TCPStore(env.addr, env.port, None, False, timedelta(seconds=5), wait_for_workers=False)
    fix = "Fix: NCCL_DEBUG=INFO in cluster.environment says more; cluster.interface, cluster.network"
    for stage in STAGES:
        behind = [rank for rank in range(env.world) if not store.check([f"passed/{stage}/{rank}"])]
        if behind:
            names = dict.fromkeys(nodes[rank // env.local_world] for rank in behind)
            who = "by no rank" if len(behind) == env.world else f"not by {', '.join(names)}, ranks {behind}"
            return f"no end within {limit_s:.0f} s: {stage} was passed {who}. {fix}"
    return f"no end within {limit_s:.0f} s, though every stage was passed. {fix}"


def init(store: dist.Store, env: RankEnv, device: str, timeout_s: float) -> torch.device:
    """The default process group over `store`; returns this rank's device."""
    place = select_device(env, device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=env.rank,
        world_size=env.world,
        timeout=timedelta(seconds=timeout_s),
    )
    return place


def node_group(world: int, local_world: int, rank: int) -> dist.ProcessGroup | None:
    """Collective. The ranks of this rank's node; None where a node has one."""
    if local_world == 1:
        return None
    groups = [
        dist.new_group(list(range(first, first + local_world))) for first in range(0, world, local_world)
    ]
    mine = groups[rank // local_world]
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def all_reduce_rate(device: torch.device, size: int, group: dist.ProcessGroup | None = None) -> float:
    """Collective over `group`. Bytes a second over each rank's links, as NCCL's own tests count them (bus bandwidth).

    Raises RuntimeError if the sum is wrong.
    """
    ranks = dist.get_world_size(group)
    data = torch.ones(size // 4, device=device)
    seconds = _best(lambda: dist.all_reduce(data, group=group), device, lambda: data.fill_(1.0))
    if not bool((data == ranks).all()):
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gave {data[0].item():g}")
    return size / seconds * 2 * (ranks - 1) / ranks


def all_to_all_rate(device: torch.device, size: int) -> float:
    """Collective over all ranks. Bytes a second that leave each rank. Raises RuntimeError if the data is wrong."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.full((ranks, max(1, size // 4 // ranks)), float(rank), device=device)
    got = torch.empty_like(rows)
    seconds = _best(lambda: dist.all_to_all_single(got, rows), device)
    if got[:, 0].tolist() != [float(other) for other in range(ranks)]:
        raise RuntimeError(f"an all-to-all brought {got[:, 0].tolist()} to rank {rank}")
    return rows.numel() * 4 / seconds * (ranks - 1) / ranks


def _best(run: Callable[[], object], device: torch.device, prepare: Callable[[], object] = int) -> float:
    """Seconds of the fastest of REPEATS runs, each behind `prepare`, which is not timed; nor is a first run."""
    times = []
    for _ in range(REPEATS + 1):
        prepare()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
