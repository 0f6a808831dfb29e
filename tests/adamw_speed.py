"""Steps of AdamW on the host, three ways in the same run: torch's fused kernel (what runs take), torch's loop over operators,
and DeepSpeed's CPUAdam, which is compiled at first use.

    python -m tests.adamw_speed [--elements 50000000] [--threads 1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

STEPS = 7
SETTINGS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


def _seconds(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], elements: int) -> float:
    """Median of a step, its states made before."""
    param = torch.nn.Parameter(torch.randn(elements))
    param.grad = torch.randn(elements)
    optimizer, taken = make([param]), []
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=50_000_000, help="fp32 parameters (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the process (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ways: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
        "torch, fused": lambda params: torch.optim.AdamW(params, fused=True, **SETTINGS),
        "torch, operator by operator": lambda params: torch.optim.AdamW(params, foreach=False, **SETTINGS),
        "DeepSpeed's CPUAdam": lambda params: DeepSpeedCPUAdam(params, adamw_mode=True, **SETTINGS),
    }
    taken = {name: _seconds(make, given.elements) for name, make in ways.items()}
    first = next(iter(taken.values()))
    for name, seconds in taken.items():
        # fp32 weights, gradients and two moments read, all but the gradients written.
        rate = 28 * given.elements / seconds / 1e9
        print(f"{name}: {1000 * seconds:.1f} ms, {rate:.1f} GB/s, {seconds / first:.2f} of the first")


if __name__ == "__main__":
    main()
