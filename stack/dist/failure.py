"""What happens when a rank fails: all ranks end, non-zero, within seconds, and the first cause is the last thing printed.

`guard(env)` goes around everything that ranks do together; `clear_errors()` around a whole program. A StackError is shown
as its message alone, anything else with its traceback. Under a launcher, lines of the launcher itself may follow.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from stack.dist.env import RankEnv
from stack.dist.launcher import check_hostfile, first_of_node_ends, local_rank, note_launcher
from stack.dist.signals import NUMBERS, Stopped
from stack.dist.watch import Watch
from stack.errors import LaunchError, StackError

if TYPE_CHECKING:
    from stack.dist.link import Link


EARLY = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Around a program: a StackError ends it with exit code 1 and its message in place of a traceback.

    Before the ranks know each other the fault is in the command or the files, so it is the same on all ranks of a node:
    only the first of each node prints it, and the others leave behind it. A signal that comes so early is told in the same
    way.
    """
    note_launcher()
    place = local_rank(os.environ)  # where each task has one GPU, LOCAL_RANK becomes 0 on all of them
    before = {number: signal.signal(number, _raise_stopped) for number in EARLY}
    try:
        yield
    except StackError as error:
        if _is_to_tell(error, place):
            sys.stdout.flush()
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(_exit_code(error)) from None
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None  # as shells say it of SIGINT
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _raise_stopped:
                signal.signal(number, handler)


def _is_to_tell(error: StackError, place: str | None) -> bool:
    """Whether this process prints the message: the first of its node, or one whose first has not met the fault.

    place: its local rank."""
    if place in (None, "0"):
        return True
    if isinstance(error, Stopped):
        return False  # all were asked to
    for number in EARLY:
        signal.signal(number, signal.SIG_DFL)  # a launcher that ends it while it waits hears no word of that
    return not first_of_node_ends()


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextmanager
def guard(env: RankEnv) -> Iterator[Watch]:
    """Around the work of all ranks: they leave it together, or they all end.

    A rank that raises tells rank 0, which prints the first cause after the others have fallen silent; then all processes
    end at once, also those that wait in a collective. A rank that ends without a word (killed, out of host memory, crashed
    in native code) is noticed by its closed connection, a lost node by its missing answers. With one rank the exception
    simply goes on. Ending skips what is behind the `with`: clean-up belongs inside it.
    """
    faulthandler.enable()
    note_launcher()
    check_hostfile(env)
    watch = Watch(env)
    watch.stop.open()
    try:
        if env.world == 1:
            with _alone(watch):
                yield watch
            return
        link = _join(env, watch)
        try:
            yield watch
            watch.disarm()
            link.leave()
        except BaseException as error:
            watch.disarm()
            if isinstance(error, SystemExit) and not error.code:
                link.leave()
                raise
            for number in NUMBERS:
                signal.signal(number, signal.SIG_IGN)  # the launcher must not cut the report short
            link.fail(describe(error, env, watch.doing), _exit_code(error), _is_echo(error))
    finally:
        watch.stop.close()


def _join(env: RankEnv, watch: Watch) -> Link:
    from stack.dist.link import join  # imports torch, which a program that only prints an error does without

    try:
        return join(env, watch)
    except LaunchError as error:
        # The others cannot be told: each rank that fails here says so itself.
        print(describe(error, env), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


@contextmanager
def _alone(watch: Watch) -> Iterator[None]:
    """The watching of a run that has one rank, by a thread."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            stopped, overdue = watch.stop.heed(), watch.overdue()
            if stopped is not None and stopped.again:
                print(f"error: {stopped}", file=sys.stderr, flush=True)
                os._exit(stopped.exit_code)
            if overdue is not None:
                print(f"{overdue}. It was at {watch.dump()}", file=sys.stderr, flush=True)
                os._exit(1)

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def describe(error: BaseException, env: RankEnv, doing: str | None = None) -> str:
    """The cause as it is printed: with the rank that saw it and what it was doing."""
    place = f"rank {env.rank} of {env.world} on {socket.gethostname()}"
    during = f" {doing}" if doing else ""
    if isinstance(error, StackError):
        seen = f"\n(seen by {place}{',' * bool(doing)}{during})" if env.rank or doing else ""
        return f"error: {error}{seen}"
    if isinstance(error, KeyboardInterrupt):
        return f"error: interrupted ({place}{during})"
    if isinstance(error, SystemExit):
        return f"error: {place} left with {error.code!r}"
    return f"{place} failed{during}:\n{''.join(traceback.format_exception(error)).rstrip()}"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def _is_echo(error: BaseException) -> bool:
    """Whether the error says no more than that a peer or its connection is gone."""
    marks = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    is_torch_error = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return is_torch_error or (isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks))
