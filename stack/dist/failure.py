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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from stack.dist.env import RankEnv
from stack.errors import LaunchError, StackError

if TYPE_CHECKING:
    from stack.dist.link import Link


class Stopped(StackError):
    """SIGTERM reached this rank: a cancelled job, a time limit, or a launcher that ends its processes."""

    def __init__(self) -> None:
        super().__init__("stopped by SIGTERM")


@contextmanager
def clear_errors() -> Iterator[None]:
    """Around a program: a StackError ends it with exit code 1 and its message in place of a traceback.

    Before the ranks know each other the fault is in the command or the files, so it is the same on all ranks of a node:
    only the first of each node prints it.
    """
    try:
        yield
    except StackError as error:
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
            sys.stdout.flush()
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(_exit_code(error)) from None
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None  # as shells say it of SIGINT


@contextmanager
def guard(env: RankEnv) -> Iterator[None]:
    """Around the work of all ranks: they leave it together, or they all end.

    A rank that raises tells rank 0, which prints the first cause after the others have fallen silent; then all processes
    end at once, also those that wait in a collective. A rank that ends without a word (killed, out of host memory, crashed
    in native code) is noticed by its closed connection, a lost node by its missing answers. With one rank the exception
    simply goes on. Ending skips what is behind the `with`: clean-up belongs inside it.
    """
    faulthandler.enable()
    before = signal.signal(signal.SIGTERM, raise_stopped)
    try:
        if env.world == 1:
            yield
            return
        link = _join(env)
        try:
            yield
            link.leave()
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                link.leave()
                raise
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the launcher must not cut the report short
            link.fail(describe(error, env), _exit_code(error), _is_echo(error))
    finally:
        signal.signal(signal.SIGTERM, before)


def _join(env: RankEnv) -> Link:
    from stack.dist.link import join  # imports torch, which a program that only prints an error does without

    try:
        return join(env)
    except LaunchError as error:
        # The others cannot be told: each rank that fails here says so itself.
        print(describe(error, env), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def describe(error: BaseException, env: RankEnv) -> str:
    """The cause as it is printed; the rank is named where it is not rank 0, whose output the reader looks at anyway."""
    place = f"rank {env.rank} of {env.world} on {socket.gethostname()}"
    if isinstance(error, StackError):
        return f"error: {error}" + (f"\n(seen by {place})" if env.rank else "")
    if isinstance(error, KeyboardInterrupt):
        return f"error: interrupted ({place})"
    if isinstance(error, SystemExit):
        return f"error: {place} left with {error.code!r}"
    return f"{place} failed:\n{''.join(traceback.format_exception(error)).rstrip()}"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return 128 + signal.SIGTERM
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


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM inside `guard`, unless the work replaces it with one of its own."""
    raise Stopped


def _default_sigterm_in_child() -> None:
    """A forked worker (data loading, tokenizing) is ended by SIGTERM without a word, as its pool expects."""
    if signal.getsignal(signal.SIGTERM) is raise_stopped:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_default_sigterm_in_child)
