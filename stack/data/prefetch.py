"""Steps worked out ahead of their use by threads, in order.

Threads and not processes: reading a memory map and copying numbers let go of Python's lock, nothing has to be sent from one
process to another, and a stop or a fork finds nothing to look after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Plan = TypeVar("Plan")
Result = TypeVar("Result")


class Prefetcher(Generic[Plan, Result]):
    """Carries out the calls of one step after the other, up to `depth` steps ahead."""

    def __init__(self, workers: int, depth: int):
        """workers: threads; 0: `next` carries out the calls itself."""
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers else None
        self._depth = depth
        self._steps: Iterator[tuple[Plan, list[Callable[[], Result]]]] = iter(())
        self._ahead: deque[tuple[Plan, list[Future[Result]]]] = deque()

    def start(self, steps: Iterator[tuple[Plan, list[Callable[[], Result]]]]) -> None:
        """Go on with these steps; what is ahead is dropped. Each step is a plan and the calls that it stands for."""
        for _, futures in self._ahead:
            for future in futures:
                future.cancel()
        self._ahead.clear()
        self._steps = steps

    def next(self) -> tuple[Plan, list[Result]] | None:
        """The next step's plan and results; None behind the last. Raises what a call raised."""
        if self._pool is None:
            step = next(self._steps, None)
            return None if step is None else (step[0], [call() for call in step[1]])
        self._submit(self._pool, 1)
        if not self._ahead:
            return None
        plan, futures = self._ahead.popleft()
        results = [future.result() for future in futures]
        self._submit(self._pool, self._depth)  # last, since the threads it wakes compete for Python's lock
        return plan, results

    def close(self) -> None:
        """End the threads; calls that have not begun are dropped."""
        self.start(iter(()))
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, depth: int) -> None:
        while len(self._ahead) < depth and (step := next(self._steps, None)) is not None:
            self._ahead.append((step[0], [pool.submit(call) for call in step[1]]))
