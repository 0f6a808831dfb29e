"""Rank 0's side of `failure.py`: one small server beside the collectives that hears of every rank's end.

Messages are lines of JSON. A rank sends {"rank", "host", "token"} to join, later {"cause", "code", "echo"} when it fails or
{"done"} when it is through. An echo is a connection that broke: the rank behind it, if it has a cause, goes first. The hub
answers {"welcome"}. After the first cause it sends {"hush"} to all, waits for each {"hushed"}, prints the cause, and sends
{"exit"}: nobody exits before the cause is printed, since a launcher that sees one process end kills the others at once.
When all are done it sends {"leave"}. A connection that closes without a word means that its process died; the ranks say
with {"hushed"} whether the kernel killed one of their node for want of memory. A rank that hangs, or that waits for one
that does, sends {"overdue"}: the hub asks all with {"where"}, and their answers {"at"} become part of the cause.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from stack.dist.env import LOOPBACK, RankEnv
from stack.dist.watch import Watch

JOIN_S = 300.0  # ranks may start minutes apart where many nodes import from one file system
LATE_S = 15.0  # how long a cause waits for ranks that have not joined yet
HUSH_S = 3.0  # how long it waits for ranks that have
ECHO_S = 2.0  # how long an echo waits for its cause: a rank may close its groups before it reports
END_S = 300.0  # how long rank 0, being done, waits for the others
WHERE_S = 10.0  # how long a rank may take to write its stacks; one that holds Python's lock never does

Message = dict[str, Any]


class Channel:
    """A socket that carries lines of JSON. In a forked worker it is closed: an end that a worker still held open would hide
    the death of its rank."""

    def __init__(self, connection: socket.socket):
        self.connection, self.buffer = connection, b""
        os.register_at_fork(after_in_child=connection.close)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        with suppress(OSError):  # the other side is gone, which the reading side notices and handles
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The whole messages that have arrived, after waiting for at least one byte; None if the other side is gone."""
        try:
            data = self.connection.recv(65536)
            *lines, self.buffer = (self.buffer + data).split(b"\n")
            return [dict(json.loads(line)) for line in lines] if data else None
        except (OSError, ValueError, TypeError):  # reset, or a stranger that does not speak this language
            return None

    def close(self) -> None:
        self.connection.close()


class Peer:
    """What the hub knows of one connection."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.rank = -1
        self.host = "?"
        self.state = "new"  # new, joined, done, hushed, gone
        self.at: str | None = None  # where it stands, once asked
        self.oom_kills = 0  # processes that the kernel killed there for want of memory


class Hub(threading.Thread):
    """Collects ends and causes, prints the first cause, and tells everybody when to end."""

    def __init__(self, env: RankEnv, watch: Watch | None = None):
        super().__init__(name="failure-hub", daemon=True)
        self.world = env.world
        self.watch = watch
        self.token = secrets.token_hex(8)  # so that a port scanner on the cluster is no rank
        self.stderr = os.dup(2)  # rank 0 itself is hushed before the cause is printed
        family = socket.getaddrinfo(env.addr, env.port, type=socket.SOCK_STREAM)[0][0]
        self.server = socket.create_server(
            (env.addr if env.addr in LOOPBACK else "", 0), family=family, backlog=1024
        )
        self.port = self.server.getsockname()[1]
        os.register_at_fork(after_in_child=self.server.close)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ)
        self.peers: dict[int, Peer] = {}
        self.cause: tuple[str, int] | None = None
        self.cause_is_echo = False
        self.dead: Peer | None = None  # whose death is the cause
        self.overdue: tuple[str, float] | None = None  # a complaint that all are asked about, and since when
        self.since = time.monotonic()  # start, end of rank 0, or first cause: what is waited from

    def run(self) -> None:
        while not (self._all_left() if self.cause is None else self._all_told()):
            for key, _ in self.selector.select(0.1):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            self._judge_answers()
        for peer in self.peers.values():
            peer.channel.close()
        self.server.close()

    def _accept(self) -> None:
        connection, _ = self.server.accept()
        connection.settimeout(5)  # a rank that does not read must not stop the others' messages
        # A node without power or network sends no closing packet: 10 s silent, then 4 questions 5 s apart.
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        ):
            connection.setsockopt(level, option, value)
        channel = Channel(connection)
        self.selector.register(channel, selectors.EVENT_READ, Peer(channel))

    def _receive(self, peer: Peer) -> None:
        messages = peer.channel.receive()
        if messages is None:
            self._drop(peer)
            return
        for message in messages:
            if peer.state != "new":
                self._heed(peer, message)
            elif message.get("token") == self.token and message["rank"] not in self.peers:
                self._welcome(peer, message)
            else:
                self._drop(peer)
                return

    def _heed(self, peer: Peer, message: Message) -> None:
        if "cause" in message:
            self._set_cause(message["cause"], message["code"], message["echo"])
        elif "hushed" in message:
            peer.state, peer.oom_kills = "hushed", message["oom_kills"]
        elif "at" in message:
            peer.at = message["at"]
        elif "overdue" in message:
            if self.overdue is None:
                self.overdue = message["overdue"], time.monotonic()
                self._tell_all({"where": True})
        else:
            peer.state = "done"
            self.since = time.monotonic() if peer.rank == 0 else self.since

    def _drop(self, peer: Peer) -> None:
        self.selector.unregister(peer.channel)
        peer.channel.close()
        if peer.state in ("joined", "done"):
            self.dead = peer if self.cause is None else self.dead
            doing = self.watch.doing if self.watch is not None else ""
            self._set_cause(died(peer.rank, self.world, peer.host, doing), 1)
        peer.state = "gone"

    def _judge_answers(self) -> None:
        """All ranks have said where they stand, or had their time: that one of them hangs becomes the cause."""
        if self.overdue is None or self.cause is not None:
            return
        silent = [rank for rank, peer in self.peers.items() if peer.at is None and peer.state != "gone"]
        if silent and time.monotonic() - self.overdue[1] < WHERE_S:
            return
        unheard = "no answer: it is in native code that holds Python's lock, or its node is gone"
        lines = [f"  rank {rank}: {peer.at or unheard}" for rank, peer in sorted(self.peers.items())]
        self._set_cause("\n".join([f"{self.overdue[0]}. Where the ranks were:", *lines]), 1)

    def _welcome(self, peer: Peer, message: Message) -> None:
        peer.rank, peer.host, peer.state = message["rank"], message["host"], "joined"
        self.peers[peer.rank] = peer
        peer.channel.send({"welcome": True})
        if self.cause is not None:
            peer.channel.send({"hush": True})

    def _set_cause(self, text: str, code: int, echo: bool = False) -> None:
        if self.cause is None:
            self.cause, self.cause_is_echo, self.since = (text, code), echo, time.monotonic()
            self._tell_all({"hush": True})
        elif self.cause_is_echo and not echo:
            self.cause, self.cause_is_echo = (text, code), False

    def _all_left(self) -> bool:
        absent = [rank for rank in range(self.world) if rank not in self.peers]
        working = [rank for rank, peer in self.peers.items() if peer.state != "done"]
        waited = time.monotonic() - self.since
        if absent and waited > JOIN_S:
            self._set_cause(f"error: ranks {absent} did not start within {JOIN_S:.0f} s of rank 0", 1)
        elif not absent and 0 not in working and working and waited > END_S:
            self._set_cause(f"error: ranks {working} did not end within {END_S:.0f} s of rank 0", 1)
        if absent or working:
            return False
        self._tell_all({"leave": True})
        return True

    def _all_told(self) -> bool:
        assert self.cause is not None
        waited = time.monotonic() - self.since
        hushed = sum(peer.state in ("hushed", "gone") for peer in self.peers.values())
        limit = HUSH_S if len(self.peers) == self.world else LATE_S
        if (self.cause_is_echo and waited < ECHO_S) or (hushed < self.world and waited < limit):
            return False
        text, code = self.cause
        text += self._memory_note()
        os.write(self.stderr, f"{text}\n".encode())
        self._tell_all({"exit": code})
        return True

    def _memory_note(self) -> str:
        if self.dead is None or self.cause_is_echo:
            return ""
        kills = max(
            (peer.oom_kills for peer in self.peers.values() if peer.host == self.dead.host), default=0
        )
        if not kills:
            return ""
        advice = self.watch.memory_advice if self.watch is not None else None
        found = f". The kernel killed {kills} process(es) there for want of host memory since the start"
        return found + (f". {advice()}" if advice is not None else "")

    def _tell_all(self, message: Message) -> None:
        """Rank 0 last: its process, and so the hub, ends with it."""
        for _, peer in sorted(self.peers.items(), reverse=True):
            peer.channel.send(message)


def died(rank: int, world: int, host: str, doing: str = "") -> str:
    """The cause of a run whose rank closed its connection without a word. doing: what rank 0 was doing."""
    return (
        f"error: rank {rank} of {world} on {host} ended without a message{' ' * bool(doing)}{doing}: killed (out of host "
        "memory?), crashed in native code, or its node was lost. The system log of that node says more"
    )
