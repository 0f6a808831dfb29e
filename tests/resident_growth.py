"""Resident memory of real CPU ranks against the exact forecast: how much a warm step needs above what lies between steps.

    python -m tests.resident_growth
    python -m tests.resident_growth --lengths 2048,4096 --memory plain,lean

Two gloo ranks run the stack's own step at each length, on fresh processes whose malloc gives freed memory back at once
(else what it keeps would hide growth). The forecast counts live bytes of device and host together, which are one here, and
what gloo holds inside a collective (`stack/bench/gloo.py`). The latter is the peak of lean layers at 2,048 tokens: gloo
sums a copy of the gradients, 20.0 MiB, with 1.8 MiB of segments, on 22.1 MiB of live tensors; measured 44.4 to 44.6. Live
tensors alone are at most 38.7, in the loss.

Nobody counts what torch's kernels take inside one call, as at 2,048 tokens 3.8 MiB in a product in bf16, 3.8 in adding
bf16 to fp32, 1.3 in attention's backward; none of these calls is at the peak.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass

from stack.bench.contender import Preset, random_rows
from stack.bench.one_process import count_alone
from stack.config.compose import compose_config
from stack.dist.env import read_rank_env
from stack.dist.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from stack.dist.topology import init_topology
from tests.ranks import run_ranks

MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
"""glibc: one heap, and every tensor of 64 KiB or more a mapping of its own, which ends with it."""

MODEL = ["model=bench", "data=random", "engine=zero3", "schedule.steps=1", "parallel.sp=2"]


@dataclass(frozen=True)
class Growth:
    """Bytes that a warm step takes above what is there between steps."""

    measured: int
    forecast: int

    @property
    def off(self) -> float:
        return self.measured / self.forecast - 1


def grown_for_real(given: list[str]) -> int:
    """On a rank: the least of three warm steps, as other things than the step only add to it."""
    cfg = compose_config(given, world=2)
    topology = init_topology(read_rank_env(dict(os.environ)), cfg.parallel.sp, "cpu", 240)
    contender = Preset(cfg, topology)
    batch, num_targets = random_rows(cfg, contender.built.spec.vocab, topology)
    grown = []
    for _ in range(4):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        topology.barrier()
        before = resident_bytes()
        assert reset_peak_resident()
        contender.passes(batch, num_targets)
        contender.update(0.0)
        grown.append(peak_resident_bytes() - before)
    return min(grown[1:])


def grown_by_count(given: list[str]) -> int:
    """In a process of its own."""
    found = count_alone(compose_config(given, world=2), 2, "cpu", virtual=False)
    return max(most.total_bytes for most in found.warm.values()) - found.resting_bytes


def compare(given: list[str], timeout_s: float = 1800) -> Growth:
    """One length, one preset."""
    real = run_ranks(grown_for_real, 2, given, timeout_s=timeout_s, env=MALLOC)
    return Growth(real[0], run_ranks(grown_by_count, 1, given, timeout_s=timeout_s, init=False)[0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.resident_growth")
    parser.add_argument("--lengths", default="2048,4096,8192,16384")
    parser.add_argument("--memory", default="plain,checkpoint,lean")
    parser.add_argument("overrides", nargs="*", metavar="setting=value")
    asked = parser.parse_intermixed_args(arguments)
    print(f"{'tokens':>8} {'memory':<11}{'measured MiB':>13}{'forecast MiB':>14}{'off':>8}")
    for memory in asked.memory.split(","):
        for length in map(int, asked.lengths.split(",")):
            found = compare([*MODEL, f"memory={memory}", f"data.seq_len={length}", *asked.overrides])
            row = f"{found.measured / 2**20:>13.1f}{found.forecast / 2**20:>14.1f}{found.off:>+8.2%}"
            print(f"{length:>8,} {memory:<11}{row}", flush=True)


if __name__ == "__main__":
    # The rank processes find its functions under this name.
    from tests.resident_growth import main as run

    run()
