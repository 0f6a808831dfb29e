"""Communication of known size on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from stack.bench.traffic import Exchanged, Traffic
from stack.patches import apply_patches
from tests.ranks import run_ranks


def exchange_known_sizes() -> dict[str, Exchanged]:
    import deepspeed
    from deepspeed.sequence.layer import _dim_zero_all_to_all, register_all_to_all_group

    apply_patches()  # without them it compiles for minutes
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    group: Any = dist.new_group([0, 1])
    register_all_to_all_group(group)
    part, whole = torch.ones(100), torch.ones(200)
    with Traffic(lambda: None, torch.device("cpu")) as traffic:
        dist.all_to_all_single(torch.empty(200), whole)
        _dim_zero_all_to_all(group, torch.ones(2, 50))
        dist.all_gather_into_tensor(whole, part)
        dist.all_gather([torch.empty(100), torch.empty(100)], part)
        dist.reduce_scatter_tensor(part, whole)
        work = dist.all_reduce(part, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(part, 0)
        dist.barrier()
    return traffic.kinds


def test_bytes_and_calls_of_each_kind() -> None:
    for kinds in run_ranks(exchange_known_sizes, 2):
        found = {kind: (one.calls, one.num_bytes) for kind, one in kinds.items()}
        assert found == {
            "all-to-all": (2, 800 + 400),
            "all-gather": (2, 800 + 800),
            "reduce-scatter": (1, 800),
            "all-reduce": (1, 400),
            "broadcast": (1, 400),
        }
        assert all(one.seconds > 0 for one in kinds.values())
