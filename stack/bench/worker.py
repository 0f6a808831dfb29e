"""One rank of one contender, from inside. It waits for what to do, does it together with the other ranks, and answers.

The process belongs to the contender alone: what a contender changes in transformers or DeepSpeed, and the memory it
takes, reach no other one.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from stack.bench.calls import Call, CallRecorder, clock_attention, clock_products, repeat, settle
from stack.bench.live_bytes import LiveBytes
from stack.bench.measured import CallCount, Inspection, Probe
from stack.bench.settings import BASELINE
from stack.bench.traffic import Traffic
from stack.config.schema import RunConfig
from stack.dist.env import read_rank_env
from stack.dist.host_memory import peak_resident_bytes, reset_peak_resident
from stack.dist.topology import Topology, init_topology
from stack.errors import StackError
from stack.models.spec import ModelSpec


@dataclass
class Reply:
    """What a rank answers; `error` is what to show, where it failed."""

    value: Any = None
    error: str = ""


def serve(connection: Connection, name: str, cfg: RunConfig, threads: int, log: Path) -> None:
    """The process's main function: everything it prints goes to `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 renamed; the log's end is shown where a rank dies.
    warnings.filterwarnings(
        "ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning
    )
    try:
        torch.set_num_threads(threads)
        worker = Worker(name, cfg)
        connection.send(Reply())
        while True:
            action, arguments = connection.recv()
            if action == "close":
                worker.topology.close()
                connection.send(Reply())
                return
            connection.send(Reply(getattr(worker, action)(*arguments)))
    except EOFError:  # the process that asks is gone
        return
    except BaseException as error:  # noqa: BLE001  whatever it is, the one who asked has to hear of it
        text = str(error) if isinstance(error, StackError) else traceback.format_exc().rstrip()
        print(text, file=sys.stderr, flush=True)
        connection.send(Reply(error=text))
        os._exit(1)  # no clean-up: the peers may sit in a collective that never ends


class Worker:
    """The actions; all at the one length that `cfg` has."""

    def __init__(self, name: str, cfg: RunConfig):
        # DeepSpeed takes its device when it is imported, from a variable that the starter has set.
        from stack.bench.baseline import Baseline
        from stack.bench.contender import Preset, random_rows

        self.cfg = cfg
        self.topology: Topology = init_topology(
            read_rank_env(os.environ), cfg.parallel.sp, cfg.site.device, cfg.engine.timeout_s
        )
        self.device = self.topology.device
        self.contender = Baseline(cfg, self.topology) if name == BASELINE else Preset(cfg, self.topology)
        self.spec = self.contender.built.spec
        self.rows = random_rows(cfg, self.spec.vocab, self.topology)
        self.calls: dict[Call, int] = {}

    def update(self) -> tuple[float, float]:
        """One step with a real update: (mean loss of all targets, gradient norm)."""
        return self._step(self.cfg.optim.lr)[1:]

    def inspect(self) -> Inspection:
        """Two untimed steps that change no weight: one watched for memory and products, one for communication."""
        on_gpu = self.device.type == "cuda"
        reset_peak_resident()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        with LiveBytes() as live, CallRecorder() as recorder:
            states = torch.cuda.memory_allocated(self.device) if on_gpu else live.at_start
            self.contender.passes(*self.rows)
            passes_peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else live.peak_device
            self.contender.update(lr=0.0)
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else live.peak_device
        rss = peak_resident_bytes()
        self.calls = dict(recorder.calls)
        with Traffic(self.topology.barrier, self.device) as traffic:
            self._step()
        kinds = {kind: asdict(found) for kind, found in traffic.kinds.items()}
        return Inspection(rss, peak, passes_peak, states, 0 if on_gpu else live.peak_host, kinds)

    def time(self) -> tuple[float, float, float]:
        """(seconds, mean loss, gradient norm) of one step that changes no weight."""
        return self._step()

    def describe(self) -> ModelSpec:
        return self.spec

    def count_calls(self) -> list[CallCount]:
        """Of the step that `inspect` watched."""
        return [
            CallCount(call.describe(), call.kind, call.flops, number) for call, number in self.calls.items()
        ]

    def probe(self) -> Probe:
        """Every product of the step by itself, on all ranks at once."""
        self.topology.barrier()
        spec, dtype = self.spec, next(self.contender.model.parameters()).dtype
        tokens = min(self.cfg.data.micro_batch * self.cfg.data.seq_len // self.topology.sp, 8192)
        rate = clock_products(tokens, spec.hidden, spec.intermediate, dtype, self.device)
        sp, rows, seq = self.topology.sp, self.cfg.data.micro_batch, self.cfg.data.seq_len
        heads, kv_heads = spec.num_heads // sp, max(1, spec.num_kv_heads // sp)
        forward_s, backward_s = clock_attention(rows, heads, kv_heads, seq, spec.head_dim, dtype, self.device)
        calls = [repeat(call, self.device) for call in self.calls]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other contenders' ranks use the same card
        return Probe(rate, forward_s, backward_s, calls)

    def _step(self, lr: float = 0.0) -> tuple[float, float, float]:
        self.topology.barrier()
        start = time.perf_counter()
        loss = self.contender.passes(*self.rows)
        norm = self.contender.update(lr)
        settle(self.device)
        self.topology.barrier()
        seconds = time.perf_counter() - start
        return seconds, float(self.topology.sum(float(loss))) / self.rows[1], norm
