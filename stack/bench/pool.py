"""The ranks of one contender, seen from the process that the user started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from stack.bench.settings import BenchSettings
from stack.bench.worker import Reply, serve
from stack.config.schema import RunConfig
from stack.errors import LaunchError

LOG_LINES = 15
FAILING_S = 3.0
"""For the other ranks to report, once one has failed."""

ENDING_S = 20.0
"""For a rank to end."""


def _is_echo(text: str) -> bool:
    return any(mark in text for mark in ("Connection closed by peer", "Connection reset by peer", "NCCL"))


class Pool:
    """Rank processes of one contender; a context manager, which leaves none behind."""

    def __init__(self, name: str, cfg: RunConfig, settings: BenchSettings, logs: Path):
        self.name, self.logs = name, [logs / f"{name}-rank{rank}.log" for rank in range(settings.ranks)]
        # The ranks meet in a store of this process, on a port of the system's choice: nobody else can take it meanwhile.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.processes, self.connections = [], []
        before = dict(os.environ)
        try:
            for rank, log in enumerate(self.logs):
                ours, theirs = context.Pipe()
                os.environ.update(self._environment(rank, settings))
                process = context.Process(
                    target=serve, args=(theirs, name, cfg, settings.threads, log), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.connections.append(ours)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _environment(self, rank: int, settings: BenchSettings) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(settings.ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(settings.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store above instead of making one
            "OMP_NUM_THREADS": str(settings.threads),
            "DS_ACCELERATOR": settings.device,
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }

    def ask(self, action: str, *arguments: Any) -> list[Any]:
        """Every rank does `action`; the answers in rank order. Raises LaunchError with the first cause."""
        for place in self.connections:
            try:
                place.send((action, arguments))
            except OSError:  # the rank is gone; its end is found below
                continue
        return self.answers()

    def answers(self) -> list[Any]:
        """What all ranks answer."""
        replies: dict[int, Reply] = {}
        self._receive(replies, None)
        if any(reply.error for reply in replies.values()):
            self._receive(replies, FAILING_S)
            errors = [(rank, reply.error) for rank, reply in sorted(replies.items()) if reply.error]
            # A rank that says no more than that its peer is gone is not the cause.
            rank, text = next(((rank, text) for rank, text in errors if not _is_echo(text)), errors[0])
            raise LaunchError(f"contender {self.name}, rank {rank}: {text}\nlog: {self.logs[rank]}")
        return [replies[rank].value for rank in range(len(self.connections))]

    def _receive(self, replies: dict[int, Reply], limit_s: float | None) -> None:
        """Fill `replies` until all are there, one is an error (without a limit), or the limit is over."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while len(replies) < len(self.connections):
            waiting = {id(place): rank for rank, place in enumerate(self.connections) if rank not in replies}
            places = [self.connections[rank] for rank in waiting.values()]
            ready = connection.wait(places, None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                return
            for place in ready:
                rank = waiting[id(place)]
                try:
                    replies[rank] = self.connections[rank].recv()
                except (EOFError, OSError):
                    replies[rank] = Reply(error=self._ended(rank))
            if limit_s is None and any(reply.error for reply in replies.values()):
                return

    def _ended(self, rank: int) -> str:
        self.processes[rank].join(ENDING_S)
        lines = self.logs[rank].read_text(errors="replace").splitlines() if self.logs[rank].exists() else []
        code = self.processes[rank].exitcode or 0
        end = f"ended with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return "\n".join([end, *lines[-LOG_LINES:]])

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.ask("close")
        for process in self.processes:
            if kind is None:
                process.join(ENDING_S)
            if process.is_alive():
                process.kill()
            process.join()
        for place in self.connections:
            place.close()
        for process in self.processes:
            for file in Path("/dev/shm").glob(f"torch_{process.pid}_*"):
                file.unlink(missing_ok=True)
