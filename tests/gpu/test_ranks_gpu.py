"""One NCCL rank on each GPU: what all other GPU tests stand on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.gpu.machine import COUNT, DEVICE
from tests.ranks import run_ranks


def sum_of_ranks(device: str) -> tuple[str, float]:
    value = torch.tensor(float(dist.get_rank()), device=device)
    dist.all_reduce(value)
    return dist.get_backend(), value.item()


def test_every_gpu_takes_part() -> None:
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    want = [(backend, COUNT * (COUNT - 1) / 2)] * COUNT
    assert run_ranks(sum_of_ranks, COUNT, DEVICE, device=DEVICE) == want
