"""What a rank knows of itself while it works: what it is doing and since when, and whether it is to stop.

`failure.guard` yields it. Errors name what the rank was doing; whoever is at one thing for too long is taken for hung, and
then all ranks write down where they stand.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

from stack.dist.env import RankEnv
from stack.dist.oom_kills import count_oom_kills
from stack.dist.signals import StopSignals

KEPT = 101  # steps that the median is taken of
FACTOR = 10.0  # times the usual length that something may take
FIRST = 4.0  # times the limit that the first step may take, which may compile, and whatever is no step
NATIVE_S = 20.0  # a rank that holds Python's lock in native code ends itself so long after its limit


class Watch:
    """One rank's."""

    def __init__(self, env: RankEnv):
        self.env = env
        self.stop = StopSignals()
        self.doing = ""
        """For people, as in `in step 12`; empty while the run starts."""

        self.memory_advice: Callable[[], str] | None = None
        """Gives what would need less host memory, once that can be told."""

        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        """Gives the error that says more to a user than the one that was raised, or the same."""

        self._oom_kills = count_oom_kills()
        self._main_thread = threading.get_ident()
        self._folder: Path | None = None
        self._limit_s = 0.0
        self._kind = ""
        self._since = time.monotonic()
        self._lengths: dict[str, deque[float]] = {}
        self.stderr: int | None = None
        """Takes the last words of a rank that hangs with Python's lock held; None leaves such a rank alone."""

    def arm(self, limit_s: float, folder: Path) -> None:
        """Take this rank for hung when it is at one thing for too long.

        limit_s: `faults.watchdog_s`, 0 for never. folder: for the stacks.
        """
        self._limit_s, self._folder = limit_s, folder
        self.enter("start", "while building the model and the engine")

    def enter(self, kind: str, doing: str) -> None:
        """From here on the rank is at something else. kind: what it is compared with, such as `step`."""
        now = time.monotonic()
        if self._kind:
            self._lengths.setdefault(self._kind, deque(maxlen=KEPT)).append(now - self._since)
        self._kind, self.doing, self._since = kind, doing, now
        if self._limit_s and self.stderr is not None:
            faulthandler.dump_traceback_later(self._allowed_s() + NATIVE_S, exit=True, file=self.stderr)

    def disarm(self) -> None:
        """Time nothing any more."""
        if self.stderr is not None:
            faulthandler.cancel_dump_traceback_later()
        self._limit_s = 0.0

    def _allowed_s(self) -> float:
        lengths = self._lengths.get(self._kind)
        if self._kind == "step" and lengths:
            return max(self._limit_s, FACTOR * median(lengths))
        # Saves are mostly over at once, and wait for a slow disk now and then.
        return max(FIRST * self._limit_s, FACTOR * max(lengths or [0.0]))

    def overdue(self) -> str | None:
        """What is wrong if this rank has been at one thing for too long."""
        if not self._limit_s:
            return None
        allowed_s = self._allowed_s()
        if time.monotonic() - self._since < allowed_s:
            return None
        return (
            f"error: no end within {allowed_s:.0f} s {self.doing} on rank {self.env.rank} of {self.env.world} "
            f"(faults.watchdog_s={self._limit_s:g})"
        )

    def dump(self) -> str:
        """Write this rank's stacks into its file; returns where it stands, for the message. For the thread that listens to
        the others: a rank that comes so far can be told to end."""
        if self.stderr is not None:
            faulthandler.cancel_dump_traceback_later()
        innermost = sys._current_frames()[self._main_thread]
        code = innermost.f_code
        place = f"{code.co_name} ({code.co_filename}:{innermost.f_lineno}) {self.doing}"
        if self._folder is None:
            return place
        path = self._folder / f"rank_{self.env.rank}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"rank {self.env.rank} on {socket.gethostname()}, {time.ctime()}: {place}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return f"{place}; its stacks could not be written: {error}"
        return f"{place}; stacks in {path}"

    def oom_kills(self) -> int:
        """Processes around this one that the kernel killed for want of memory since the start."""
        return count_oom_kills() - self._oom_kills
