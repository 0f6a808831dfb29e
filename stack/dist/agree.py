"""Work that rank 0 does for all ranks.

If it fails there, the error goes up on rank 0 alone, and `failure.guard` ends the ranks that wait for it here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from stack.dist.topology import Topology
from stack.errors import StackError

Value = TypeVar("Value")


def on_main(topology: Topology, action: Callable[[], Value]) -> Value:
    """Run `action` on rank 0; every rank returns its value."""
    return topology.broadcast_object(action() if topology.is_main else None)


def on_main_slowly(
    topology: Topology,
    action: Callable[[], Value],
    tell: Callable[[float], None],
    beat_s: float = 30.0,
    limit_s: float = 6 * 3600.0,
) -> Value:
    """Like `on_main` for work that may outlast the timeout of a collective.

    `action` runs in a thread of rank 0 while its main thread sends a sign of life every `beat_s` seconds, so that no
    collective waits longer than that. `tell(seconds so far)` is called on rank 0 at each beat. Raises StackError after
    `limit_s`.
    """
    if not topology.is_main:
        while (message := topology.broadcast_object(None)) is None:
            pass
        return message[0]
    values: list[Value] = []
    errors: list[BaseException] = []
    worker = threading.Thread(target=_keep_outcome, args=(action, values, errors), daemon=True)
    start = time.monotonic()
    worker.start()
    worker.join(beat_s)
    while worker.is_alive():
        waited = time.monotonic() - start
        if waited > limit_s:
            raise StackError(f"rank 0 was not ready after {waited:.0f} s")
        tell(waited)
        topology.broadcast_object(None)
        worker.join(beat_s)
    if errors:
        raise errors[0]
    topology.broadcast_object(tuple(values))
    return values[0]


def _keep_outcome(action: Callable[[], Value], values: list[Value], errors: list[BaseException]) -> None:
    try:
        values.append(action())
    except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
        errors.append(error)
