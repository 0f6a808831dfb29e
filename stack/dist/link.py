"""Every rank's side of `failure.py`: a connection to rank 0's hub, and a thread that ends this process when told to."""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from torch.distributed import DistError, TCPStore

from stack.dist.env import RankEnv
from stack.dist.failure import describe
from stack.dist.hub import HUSH_S, JOIN_S, LATE_S, Channel, Hub, died
from stack.dist.launcher import gone_launcher
from stack.dist.watch import Watch
from stack.errors import LaunchError


def join(env: RankEnv, watch: Watch) -> Link:
    """Connects this rank to the hub, which rank 0 starts. Raises LaunchError if the others cannot be reached."""
    from_agent = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )  # torchrun's agent listens on the port itself
    is_server = env.rank == 0 and not from_agent
    joined = threading.Event()
    threading.Thread(target=_watch_joining, args=(env, watch, joined), daemon=True).start()
    try:
        # multi_tenant: init_process_group later uses the same server on the same port
        timeout = timedelta(seconds=JOIN_S)
        store = TCPStore(
            env.addr, env.port, env.world, is_server, timeout, wait_for_workers=False, multi_tenant=True
        )
        key = f"hub/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if env.rank == 0:
            hub = Hub(env, watch)
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
    finally:
        joined.set()
    return Link(env, watch, Channel(connection), place["token"], store)


def _watch_joining(env: RankEnv, watch: Watch, joined: threading.Event) -> None:
    """The main thread waits for rank 0 in native code: somebody has to notice that the start was called off."""
    while not joined.wait(0.5):
        stopped, gone = watch.stop.heed(), gone_launcher(env)
        if stopped is not None or gone is not None:
            text = f"error: {stopped or gone} (rank {env.rank} of {env.world}, while ranks join)\n"
            os.write(2, text.encode())
            os._exit(1 if stopped is None else stopped.exit_code)


class Link:
    """This rank's connection to the hub."""

    def __init__(self, env: RankEnv, watch: Watch, channel: Channel, token: str, store: TCPStore):
        self.env, self.watch, self.channel = env, watch, channel
        self.store = store  # kept: its server, on rank 0, lives as long as this object
        self.stderr = os.dup(2)
        self.all_done = threading.Event()
        self.launcher_is_missed = False
        channel.send({"rank": env.rank, "host": socket.gethostname(), "token": token})
        if channel.receive() is None:
            raise LaunchError(
                f"rank {env.rank} is there twice on port {env.port}. Fix: give each job a port of its own"
            )
        channel.connection.settimeout(None)
        watch.stderr = self.stderr
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

    def _tell(self, text: str, code: int, echo: bool = False) -> None:
        self.channel.send({"cause": text, "code": code, "echo": echo})

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        stop, asked = self.watch.stop, False
        for source in (self.channel, stop):
            selector.register(source, selectors.EVENT_READ)
        while not self.all_done.is_set():
            ready = [key.fileobj for key, _ in selector.select(1.0)]
            if stop in ready and (stopped := stop.heed()) is not None:
                self._tell(describe(stopped, self.env, self.watch.doing), stopped.exit_code)
            if not asked and (overdue := self.watch.overdue()) is not None:
                asked = True
                self.channel.send({"overdue": overdue})
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
                    self.channel.send({"hushed": True, "oom_kills": self.watch.oom_kills()})
                elif "where" in message:
                    self.channel.send({"at": self.watch.dump()})
                elif "leave" in message:
                    self.all_done.set()

    def _check_launcher(self) -> None:
        """A launcher that was killed leaves its ranks running: they end themselves, with what they have saved if they can."""
        gone = None if self.launcher_is_missed else gone_launcher(self.env)
        if gone is not None:
            self.launcher_is_missed = True
            if not self.watch.stop.ask(gone):
                self._tell(f"error: {gone}", 1)

    def _end_without_rank_zero(self) -> NoReturn:
        if self.env.rank == 1:
            text = died(0, self.env.world, self.env.addr, self.watch.doing)
            os.write(self.stderr, text.encode() + b"\n")
        os._exit(1)

    def _hush(self) -> None:
        """Nothing more from this process: what its threads print while it ends would bury the cause."""
        with suppress(OSError, ValueError):  # a closed or broken stream has nothing to lose
            sys.stdout.flush()
            sys.stderr.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
