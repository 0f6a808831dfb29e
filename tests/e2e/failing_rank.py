"""A small program whose last rank, or first, fails in the way that its last argument names."""

from __future__ import annotations

import os
import signal
import sys
import time

from stack.dist.env import apply_rank_env, read_rank_env
from stack.dist.failure import clear_errors, guard
from stack.dist.watch import Watch
from stack.errors import ConfigError, DataError, Fault


def fail(way: str, rank: int, last: int) -> None:
    if (way == "raise" and rank == last) or (way == "raise first" and rank == 0):
        raise ValueError("something unforeseen")
    if way == "bad data" and rank == last:
        raise DataError("line 3 of a.txt is broken. Fix: mend it")
    if (way == "killed" and rank == last) or (way == "killed first" and rank == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stopped" and rank == last:
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "exit" and rank == last:
        sys.exit(3)
    if way == "stuck" and rank == last:
        print("now stuck", flush=True)
        time.sleep(600)


def wait_until_asked(watch: Watch) -> None:
    """Steps until one rank is asked to stop."""
    import torch
    import torch.distributed as dist

    watch.stop.defer()
    wishes = torch.zeros(1)
    dist.all_reduce(wishes)  # no rank is asked before all can be
    print("at work", flush=True)
    while not wishes:
        time.sleep(0.01)
        wishes = torch.tensor([float(watch.stop.wish is not None)])
        dist.all_reduce(wishes)
    if watch.stop.wish:
        sys.stdout.write(f"asked to stop: {watch.stop.wish}\n")
    watch.stop.ignore()


def main(way: str) -> None:
    env = read_rank_env(os.environ)
    apply_rank_env(env)
    fault = ConfigError([Fault("parallel.sp", 3, "a divisor of 2", "parallel.sp=2")])
    if way == "first comes late" and env.local_rank == 0:
        time.sleep(4)  # launchers look once a second, or oftener, whether a rank has left
    if way in ("bad setting", "first comes late"):
        raise fault
    with guard(env) as watch:
        if way == "bad setting seen late":
            raise fault
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=env.rank, world_size=env.world)
        if way == "asked":
            wait_until_asked(watch)
            way = "ok"
        for step in range(10_000):
            dist.all_reduce(torch.ones(1))
            if step == 2:
                fail(way, env.rank, env.world - 1)
                if way == "ok" or (way == "late" and env.rank == env.world - 1):
                    break
            time.sleep(0.01)
        dist.destroy_process_group()
        if way == "late":
            raise ValueError("something unforeseen")
    sys.stdout.write(f"rank {env.rank} left\n")  # print would write the end of the line apart


if __name__ == "__main__":
    with clear_errors():
        main(sys.argv[-1])
