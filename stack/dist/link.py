"""Every rank's side of `failure.py`: a connection to rank 0's hub, and a thread that ends this process when told to."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import psutil
from torch.distributed import DistError, TCPStore

from stack.dist.env import RankEnv
from stack.dist.failure import Stopped, describe, raise_stopped
from stack.dist.hub import HUSH_S, JOIN_S, LATE_S, Channel, Hub, died
from stack.errors import LaunchError


def join(env: RankEnv) -> Link:
    """Connects this rank to the hub, which rank 0 starts. Raises LaunchError if the others cannot be reached."""
    from_agent = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )  # torchrun's agent listens on the port itself
    is_server = env.rank == 0 and not from_agent
    try:
        # multi_tenant: init_process_group later uses the same server on the same port
        timeout = timedelta(seconds=JOIN_S)
        store = TCPStore(
            env.addr, env.port, env.world, is_server, timeout, wait_for_workers=False, multi_tenant=True
        )
        key = f"hub/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if env.rank == 0:
            hub = Hub(env)
            hub.start()
            store.set(key, json.dumps({"port": hub.port, "token": hub.token}))
        place = json.loads(store.get(key))
        connection = socket.create_connection((env.addr, place["port"]), JOIN_S)
    except (DistError, OSError) as error:
        where, reason = f"{env.addr}:{env.port}", str(error).splitlines()[0]
        if is_server:
            text = (
                f"rank 0 cannot listen on {where}: {reason}. Fix: another port (--master_port, MASTER_PORT)"
            )
        else:
            text = f"rank {env.rank} cannot reach rank 0 at {where}: {reason}. Fix: see that all {env.world} ranks start"
        raise LaunchError(text) from error
    return Link(env, Channel(connection), place["token"], store)


class Link:
    """This rank's connection to the hub."""

    def __init__(self, env: RankEnv, channel: Channel, token: str, store: TCPStore):
        self.env, self.channel = env, channel
        self.store = store  # kept: its server, on rank 0, lives as long as this object
        self.stderr = os.dup(2)
        self.all_done = threading.Event()
        self.launcher = _launcher_processes(env)
        channel.send({"rank": env.rank, "host": socket.gethostname(), "token": token})
        if channel.receive() is None:
            raise LaunchError(
                f"rank {env.rank} is there twice on port {env.port}. Fix: give each job a port of its own"
            )
        channel.connection.settimeout(None)
        self.signals, writing_end = socket.socketpair()
        for end in (self.signals, writing_end):
            end.setblocking(False)
        self.writing_end = writing_end  # kept open
        signal.set_wakeup_fd(writing_end.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="failure-link", daemon=True).start()

    def fail(self, text: str, code: int, echo: bool) -> NoReturn:
        """Tells all ranks that this one failed; the process ends with `code`, or with that of an earlier cause.

        echo: it failed because a connection to a peer broke, so the peer's cause, if there is one, goes first.
        """
        self._tell(text, code, echo)
        time.sleep(LATE_S + HUSH_S + 5)  # the watching thread ends the process, mostly at once
        os.write(self.stderr, f"{text}\n".encode())
        os._exit(code)

    def leave(self) -> None:
        """Returns when all ranks are done."""
        self.channel.send({"done": True})
        self.all_done.wait()
        signal.set_wakeup_fd(-1)

    def _tell(self, text: str, code: int, echo: bool = False) -> None:
        self.channel.send({"cause": text, "code": code, "echo": echo})

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for source in (self.channel, self.signals):
            selector.register(source, selectors.EVENT_READ)
        while not self.all_done.is_set():
            ready = [key.fileobj for key, _ in selector.select(1.0)]
            if self.signals in ready:
                self._heed(self.signals.recv(64))
            if self.channel not in ready:
                self._check_launcher()
                continue
            messages = self.channel.receive()
            if messages is None:
                self._end_without_rank_zero()
            for message in messages:
                if "exit" in message:
                    os._exit(message["exit"])
                elif "hush" in message:
                    self._hush()
                    self.channel.send({"hushed": True})
                elif "leave" in message:
                    self.all_done.set()

    def _heed(self, signals: bytes) -> None:
        """Python runs a signal's handler between two lines of Python: a rank inside a collective would never get to it."""
        if signal.SIGTERM in signals and signal.getsignal(signal.SIGTERM) is raise_stopped:
            self._tell(describe(Stopped(), self.env), 128 + signal.SIGTERM)

    def _check_launcher(self) -> None:
        """A launcher that was killed leaves its ranks running: they end themselves."""
        now = _launcher_processes(self.env)
        if now != self.launcher:
            gone = sorted(set(self.launcher) - set(now))
            self._tell(f"error: the {self.env.launcher} launcher (process {gone}) is gone", 1)
            self.launcher = now

    def _end_without_rank_zero(self) -> NoReturn:
        if self.env.rank == 1:
            os.write(self.stderr, died(0, self.env.world, self.env.addr).encode() + b"\n")
        os._exit(1)

    def _hush(self) -> None:
        """Nothing more from this process: what its threads print while it ends would bury the cause."""
        with suppress(OSError, ValueError):  # a closed or broken stream has nothing to lose
            sys.stdout.flush()
            sys.stderr.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)


def _launcher_processes(env: RankEnv) -> list[int]:
    """Numbers of the processes above this one that must live for the run to go on.

    Only launchers that wait for their ranks count: the shell above a plain process may end, as with nohup, and srun's
    tasks are ended by Slurm itself. deepspeed has two: the command, and below it one launcher a node.
    """
    if env.launcher not in ("deepspeed", "torchrun"):
        return []
    parent = os.getppid()
    if env.launcher == "deepspeed":
        with suppress(psutil.Error):  # the launcher is just ending
            return [parent, psutil.Process(parent).ppid()]
    return [parent]
