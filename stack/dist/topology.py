"""The axes of a run: `sp` ranks share each row of tokens, `dp` groups of them work on different rows.

Rank r stands at dp_rank = r // sp, sp_rank = r % sp, so that the ranks of a row are neighbours and their exchanges stay
inside a node where they can.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from stack.dist.env import RankEnv, apply_rank_env
from stack.errors import ConfigError, Fault, LaunchError

Number = TypeVar("Number", int, float)


@dataclass
class Topology:
    """Where this rank stands, and the groups it talks to. A group of one rank is None."""

    rank: int
    world: int
    sp: int
    dp: int
    sp_rank: int
    dp_rank: int
    device: torch.device
    sp_group: dist.ProcessGroup | None
    host_group: dist.ProcessGroup | None
    """All ranks over gloo, for counts and Python objects, so that they never need the device."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, value: Number) -> Number:
        """Sum over all ranks, as int64 or float64; the result has the type of `value`."""
        return self.sum_each([value])[0]

    def sum_each(self, values: Sequence[Number]) -> list[Number]:
        """Sum of each value over all ranks in one exchange, as int64 if the first is an int, else as float64."""
        dtype = torch.int64 if isinstance(values[0], int) else torch.float64
        totals = torch.tensor(list(values), dtype=dtype)
        if self.world > 1:
            dist.all_reduce(totals, group=self.host_group)
        return totals.tolist()

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.host_group)

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def close(self) -> None:
        """End the process groups; ranks that skip this abort at exit now and then."""
        if dist.is_initialized():
            dist.destroy_process_group()


def init_topology(env: RankEnv, sp: int, device: str, timeout_s: int) -> Topology:
    """Join the other ranks and build the groups.

    device: "cpu" (gloo) or "cuda" (NCCL, with gloo beside it for counts). Raises ConfigError if `sp` does not divide
    the number of ranks, LaunchError if the device is not there.
    """
    if env.world % sp:
        fix = f"start a multiple of {sp} ranks, or set parallel.sp to a divisor of {env.world}"
        raise ConfigError([Fault("parallel.sp", sp, f"a divisor of the {env.world} rank(s) started", fix)])
    apply_rank_env(env)
    torch_device = select_device(env, device)  # behind it, as it may set LOCAL_RANK to another number
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, rank=env.rank, world_size=env.world, timeout=timeout)
    host_group = _new_group(list(range(env.world)), timeout, "gloo") if env.world > 1 else None
    sp_group = None
    # Every rank has to take part in the creation of every group, in the same order.
    for first in range(0, env.world, sp) if sp > 1 else ():
        members = list(range(first, first + sp))
        group = _new_group(members, timeout)
        if env.rank in members:
            sp_group = group
    return Topology(
        rank=env.rank,
        world=env.world,
        sp=sp,
        dp=env.world // sp,
        sp_rank=env.rank % sp,
        dp_rank=env.rank // sp,
        device=torch_device,
        sp_group=sp_group,
        host_group=host_group,
    )


def _new_group(
    members: list[int], timeout: datetime.timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    # Typed as a number too, for ranks outside; what they get is never used.
    return cast(dist.ProcessGroup, dist.new_group(members, timeout=timeout, backend=backend))


def select_device(env: RankEnv, device: str) -> torch.device:
    """This rank's device, made the current one. Raises LaunchError where the node has fewer GPUs than ranks."""
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and env.launcher == "srun":
        # With --gpus-per-task=1 each task sees its own GPU only, as number 0. DeepSpeed takes its device from LOCAL_RANK.
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    if env.local_rank >= count:
        raise LaunchError(
            f"local rank {env.local_rank} has no GPU: {count} visible here. Fix: start at most {count} ranks on this "
            "node, check CUDA_VISIBLE_DEVICES, or set site.device=cpu"
        )
    torch.cuda.set_device(env.local_rank)
    return torch.device("cuda", env.local_rank)
