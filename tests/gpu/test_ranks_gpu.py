"""One NCCL rank on each GPU: what all other GPU tests stand on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def sum_of_ranks() -> tuple[str, float]:
    value = torch.tensor(float(dist.get_rank()), device="cuda")
    dist.all_reduce(value)
    return dist.get_backend(), value.item()


def test_every_gpu_takes_part() -> None:
    count = torch.cuda.device_count()
    assert run_ranks(sum_of_ranks, count, device="cuda") == [("nccl", count * (count - 1) / 2)] * count
