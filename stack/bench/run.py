"""The order of a run: agreement first, then at each length the untimed steps, the turns, and at the end the report."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from stack.bench.measured import Measured
from stack.bench.pool import Pool
from stack.bench.report import draw, tables
from stack.bench.settings import BenchSettings, contender_configs
from stack.bench.summary import Growth, Row, growth_of, rows_of
from stack.config.schema import RunConfig
from stack.errors import StackError

TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (2e-3, 2e-2), "fp16": (2e-3, 2e-2)}
"""Precision -> largest relative difference of loss and of gradient norm between contenders that train the same."""


def run_bench(settings: BenchSettings) -> None:
    """Measure and report. Raises StackError if a contender cannot run, or if they do not train the same."""
    configs = {seq: contender_configs(settings, seq) for seq in settings.lengths}
    logs = settings.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    say = _teller()
    say(
        f"{settings.ranks} {settings.device} rank(s) for each of {', '.join(settings.contenders)}; logs in {logs}"
    )
    rows, updates, calls = [], {}, {}
    for seq, of_length in configs.items():
        with ExitStack() as stack:
            # New ranks for each length: what a longer or shorter one has left in memory would show.
            pools = {}
            for name, cfg in of_length.items():
                pools[name] = stack.enter_context(Pool(name, cfg, settings, logs))
                pools[name].answers()
            say(f"{seq:,} tokens: ranks started")
            updates[seq] = _agree(pools, of_length, settings, say)
            spec = pools[settings.contenders[0]].ask("describe")[0]
            measured = _turns(pools, of_length, settings, say)
        cfg = of_length[settings.contenders[0]]
        rows += rows_of(measured, spec, cfg.parallel.sp, cfg.data.micro_batch)
        calls[seq] = {one.contender: _calls(one) for one in measured}
        fits = growth_of(rows)
        # After each length, so that a run that is stopped leaves what it has.
        _write(settings, cfg, {"updates": updates, "calls": calls}, rows, fits)
    print(f"\n{tables(rows, growth_of(rows))}\n\nresults: {settings.out}", flush=True)


def _teller() -> Callable[[str], None]:
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.0f} s] {text}", flush=True)

    return say


def _agree(
    pools: dict[str, Pool], configs: dict[str, RunConfig], settings: BenchSettings, say: Callable[[str], None]
) -> dict[str, list[tuple[float, float]]]:
    """Real updates from the same weights on the same rows: (loss, gradient norm) of each, by contender."""
    found = {}
    for name, pool in pools.items():
        found[name] = [pool.ask("update")[0] for _ in range(settings.updates)]
        say(
            f"{name}: loss {_list(loss for loss, _ in found[name])}, norm {_list(norm for _, norm in found[name])}"
        )
    _compare(found, configs)
    return found


def _list(numbers: Any) -> str:
    return " ".join(f"{number:.5g}" for number in numbers)


def _compare(found: dict[str, list[tuple[float, float]]], configs: dict[str, RunConfig]) -> None:
    first = next(iter(found))
    tolerance = TOLERANCE[configs[first].engine.precision]
    for name, steps in found.items():
        for step, (ours, theirs) in enumerate(zip(steps, found[first], strict=True), start=1):
            for what, one, other, most in zip(
                ("loss", "gradient norm"), ours, theirs, tolerance, strict=True
            ):
                if not abs(one - other) <= most * abs(other):
                    raise StackError(
                        f"{name} and {first} do not train the same: {what} {one:.6g} and {other:.6g} at step {step}, "
                        f"more than {most:g} apart; a comparison would mean nothing"
                    )


def _turns(
    pools: dict[str, Pool], configs: dict[str, RunConfig], settings: BenchSettings, say: Callable[[str], None]
) -> list[Measured]:
    """All contenders at one length: the untimed steps, then a timed one each in turn."""
    found = {}
    for name, pool in pools.items():
        seq = configs[name].data.seq_len
        say(f"{seq:,} tokens, {name}: untimed steps")
        found[name] = Measured(name, seq, pool.ask("inspect"), pool.ask("count_calls"))
    for turn in range(1, settings.steps + 1):
        for name, pool in pools.items():
            timed = pool.ask("time")
            found[name].seconds.append(max(seconds for seconds, _, _ in timed))
            found[name].loss, found[name].grad_norm = timed[0][1:]
            found[name].probes.append(pool.ask("probe"))
        taken = ", ".join(f"{name} {one.seconds[-1]:.3g} s" for name, one in found.items())
        say(f"turn {turn} of {settings.steps}: {taken}")
    _compare({name: [(one.loss, one.grad_norm)] for name, one in found.items()}, configs)
    return list(found.values())


def _write(
    settings: BenchSettings, cfg: RunConfig, details: dict[str, Any], rows: list[Row], fits: list[Growth]
) -> None:
    """bench.json, bench.txt and bench.png."""
    content = {
        "machine": {
            "processor": _processor(settings.device),
            "cores": psutil.cpu_count(),
            "system": platform.platform(),
            "torch": torch.__version__,
            "load_average": psutil.getloadavg(),
        },
        "settings": {**asdict(settings), "out": str(settings.out)},
        "model": cfg.model.name,
        "precision": cfg.engine.precision,
        "results": [asdict(row) for row in rows],
        "growth": [asdict(fit) for fit in fits],
        **details,
    }
    settings.out.joinpath("bench.json").write_text(json.dumps(content, indent=1) + "\n")
    settings.out.joinpath("bench.txt").write_text(tables(rows, fits) + "\n")
    draw(rows, fits, settings.out / "bench.png")


def _calls(one: Measured) -> list[dict[str, Any]]:
    """Rank 0's products, and the median seconds of each by itself."""
    times = [median(turn[0].calls_s[place] for turn in one.probes) for place in range(len(one.calls[0]))]
    return [{**asdict(call), "seconds": seconds} for call, seconds in zip(one.calls[0], times, strict=True)]


def _processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
