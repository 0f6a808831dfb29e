"""Units of the source to shards, in this process or in several at once.

Workers are started anew (spawn), since the process that prepares may hold threads, a device and rank variables that a
fork would copy. Each is handed one unit after the other over a pipe of its own. When the parent is gone, also by
kill -9, the pipe breaks at the next batch and the worker ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from stack.data.encode import Recipe, ShardMaker
from stack.data.progress import Progress
from stack.data.sources import Unit
from stack.errors import DataError, StackError

SMALL_BYTES = 64 << 20
"""Below this much text, starting processes takes longer than they save."""

MOST_WORKERS = 8
"""Of their own accord: more would surprise on a shared machine. `data.prepare_workers` takes any number."""


def choose_workers(asked: int | None, total_bytes: int, num_units: int) -> int:
    """Processes to start; 0 for none. total_bytes: of the source, 0 if unknown, as of a dataset on the hub."""
    if asked is None:
        small = 0 < total_bytes < SMALL_BYTES
        asked = 0 if small else min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    return min(asked, num_units)


def make_shards(
    recipe: Recipe, units: Sequence[Unit], todo: Sequence[int], num_workers: int, progress: Progress
) -> None:
    """Make the shards of the units numbered in `todo`. Raises what the first of them to fail raised."""
    if num_workers == 0:
        maker = ShardMaker(recipe)
        for number in todo:
            maker.make(number, units[number], progress.advance)
            progress.finish_unit(units[number].size)
        return
    waiting = list(reversed(todo))
    with _start_workers(recipe, num_workers) as workers:
        idle, busy = list(workers), {}
        while waiting or busy:
            while waiting and idle:
                pipe, number = idle.pop(), waiting.pop()
                _hand_over(pipe, workers[pipe], (number, units[number]))
                busy[pipe] = number
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                message = _receive(pipe, workers[pipe])
                if message is None:
                    progress.finish_unit(units[busy.pop(pipe)].size)
                    idle.append(pipe)
                else:
                    progress.advance(*message)


@contextmanager
def _start_workers(recipe: Recipe, count: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Workers by the pipe to each; ended when the block is left, however."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(there, recipe), daemon=True, name="prepare")
            worker.start()
            there.close()  # so that the pipe breaks when the worker ends
            workers[here] = worker
        yield workers
    finally:
        for pipe, worker in workers.items():
            pipe.close()
            worker.terminate()
            worker.join()


def _hand_over(pipe: Connection, worker: BaseProcess, task: tuple[int, Unit]) -> None:
    try:
        pipe.send(task)
    except OSError as error:
        raise _explain_end(worker) from error


def _receive(pipe: Connection, worker: BaseProcess) -> tuple[int, int] | None:
    """(bytes, tokens) done, or None when the unit is finished. Raises what the worker raised."""
    try:
        message = pipe.recv()
    except (EOFError, OSError) as error:
        raise _explain_end(worker) from error
    if isinstance(message, BaseException):
        raise message
    return message


def _explain_end(worker: BaseProcess) -> DataError:
    worker.join(timeout=10)
    fix = "see what ended it; where memory ran out, lower data.prepare_workers"
    return DataError(
        f"a process that prepares tokens ended with code {worker.exitcode}. Fix: {fix}, and start again: what is "
        "complete stays"
    )


def _serve(pipe: Connection, recipe: Recipe) -> None:
    """A worker: units in, progress and None for each finished one out."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    try:
        maker = ShardMaker(recipe)
        while True:
            number, unit = pipe.recv()
            maker.make(number, unit, lambda num_bytes, num_tokens: _send(pipe, (num_bytes, num_tokens)))
            _send(pipe, None)
    except (EOFError, _ParentGone):
        return
    except Exception as error:  # noqa: BLE001  raised again by the parent
        known = isinstance(error, StackError | OSError)
        try:
            _send(pipe, error if known else RuntimeError(f"in a worker:\n{traceback.format_exc()}"))
        except _ParentGone:
            return


class _ParentGone(Exception):
    """Nobody reads what the worker sends."""


def _send(pipe: Connection, message: Any) -> None:
    try:
        pipe.send(message)
    except OSError as error:
        raise _ParentGone from error
