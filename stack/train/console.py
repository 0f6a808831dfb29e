"""What a person sees of the run: one line a step on rank 0."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from stack.checkpoint.state import TrainState

WINDOW = 20  # steps over which the time left is estimated


def tell(text: str) -> None:
    """A line for the person at the console; called on rank 0."""
    print(text, flush=True)


def tell_waiting(what: str, seconds: float) -> None:
    """A sign of life while other ranks wait for rank 0."""
    tell(f"still {what} ({format_duration(seconds)})")


class ConsoleHook:
    """A progress line every `every` steps, and at once for a skipped step. Rank 0 only."""

    def __init__(self, every: int, total_steps: int):
        self._every, self._total_steps = every, total_steps
        self._ends = deque([time.monotonic()], maxlen=WINDOW + 1)
        self._small_steps = 0

    def after_step(self, state: TrainState, record: dict[str, Any]) -> None:
        self._ends.append(time.monotonic())
        for notice in self._notices(record):
            print(f"step {state.step}: {notice}", flush=True)
        if state.step % self._every == 0 or state.step == self._total_steps or state.step == 1:
            print(progress_line(record, self._total_steps, self._eta_s(state)), flush=True)

    def _eta_s(self, state: TrainState) -> float:
        """Seconds left, from the last steps with all that happened between them (evaluation, checkpoints)."""
        per_step = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return per_step * (self._total_steps - state.step)

    def _notices(self, record: dict[str, Any]) -> list[str]:
        notices = []
        if record["skipped"]:
            counts = ("skipped_steps", "overflow_steps", "empty_steps", "dropped_steps")
            total = sum(record[key] for key in counts)
            notices.append(f"skipped ({record['skipped']}); {total} skipped so far")
        if record["small_steps"] > self._small_steps:
            notices.append(
                f"smaller step of {record['rows']} row(s): the last window of an epoch is not full"
            )
        self._small_steps = record["small_steps"]
        return notices

    def close(self) -> None:
        pass


def progress_line(record: dict[str, Any], total_steps: int, eta_s: float) -> str:
    """The numbers of one step in one line of about 140 characters."""
    clipped = " (clipped)" if record["clipped"] else ""
    parts = [
        f"step {record['step']}/{total_steps}",
        f"loss {_number(record['loss'], '.4f')}",
        f"grad {_number(record['grad_norm'], '.3g')}{clipped}",
        f"lr {record['lr']:.2e}",
        f"tokens/s {record['tokens_per_s']:,.0f} ({record['tokens_per_s_per_rank']:,.0f} a rank)",
    ]
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    if "memory_allocated_peak_gib" in record:
        parts.append(f"device {record['memory_allocated_peak_gib']:.1f} GiB")
    parts.append(f"host {record['host_rss_gib']:.2f} GiB")
    if "data_wait_s" in record:
        parts.append(f"data wait {record['data_wait_s'] / record['step_s']:.1%}")
    if "eval_loss" in record:
        parts.append(f"eval loss {_number(record['eval_loss'], '.4f')}")
    parts.append(f"ETA {format_duration(eta_s)}")
    return " | ".join(parts)


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def format_duration(seconds: float) -> str:
    """Days, hours, minutes and seconds, as in `1d 02:03:04` or `3:04`."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
