"""SIGTERM, SIGUSR1 and SIGINT: somebody wants the run to end.

What they do depends on the moment. Until `defer` is called they end the run at once, since nothing is lost by it. From
then on the first one is a wish, on which the ranks agree at their next step; one that comes later than SAME_S after it
ends the run at once. After `ignore` they come too late to matter.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from stack.errors import StackError

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_S = 2.0  # one Ctrl-C reaches a rank from the terminal, and again from its launcher


class Stopped(StackError):
    """A signal ends this rank at once: a cancelled job, a time limit, or a launcher that ends its processes."""

    def __init__(self, number: int = signal.SIGTERM, again: bool = False):
        self.exit_code = 128 + number  # as shells say it
        self.again = again
        super().__init__(f"stopped by {'a second signal, ' * again}{signal.Signals(number).name}")


class StopSignals:
    """The signals of this process between `open` and `close`, both called in its main thread.

    Python runs a handler between two lines of Python, so a rank inside a collective would never get to it: a thread that
    waits for `fileno` and calls `heed` hears of a signal at once.
    """

    def __init__(self) -> None:
        self.wish: str | None = None
        """Why the run is to stop; None: it is not."""

        self._mode = "raise"
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        os.register_at_fork(after_in_child=self._after_fork)

    def open(self) -> None:
        """Handle the signals from here on."""
        self._before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Handle them as before `open`; after `ignore`, go on ignoring them."""
        if self._before:
            signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            # Launchers pass a signal on late, to a rank whose work is done and saved.
            signal.signal(number, signal.SIG_IGN if self._mode == "ignore" else handler)
        self._before = {}

    def defer(self) -> None:
        """From here on the first signal is a wish that `wish` tells of."""
        self._mode = "defer"

    def undefer(self) -> None:
        """From here on a signal ends the run at once again."""
        self._mode = "raise"

    def ignore(self) -> None:
        """The run has stopped as wished: further signals change nothing."""
        self._mode = "ignore"

    def ask(self, why: str) -> bool:
        """Wish the run to stop for another reason than a signal. False: nobody would heed it now."""
        if self._mode == "raise":
            return False
        if self.wish is None:
            self.wish, self._since = why, time.monotonic()
        return True

    def fileno(self) -> int:
        return self._reading.fileno()

    def heed(self) -> Stopped | None:
        """Take note of the signals that have come; the error that is to end this process now, if one is."""
        with suppress(BlockingIOError):
            for number in self._reading.recv(64):
                if number not in NUMBERS or self._mode == "ignore":
                    continue
                if self._mode == "raise":
                    return Stopped(number)
                if self.wish is None:
                    self.ask(signal.Signals(number).name)
                elif time.monotonic() - self._since > SAME_S:
                    return Stopped(number, again=True)
        return None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._mode == "raise":
            raise Stopped(number)

    def _after_fork(self) -> None:
        """A forked worker (loading, tokenizing) is ended by SIGTERM without a word, as its pool expects; the other two are
        for its parent, even if they are sent to all processes."""
        if self._before:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
