"""A line that says how far long work has come: rewritten in place on a terminal, every 10 s elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts bytes of text and tokens of one pass over a source, and how much of the whole is finished."""

    def __init__(self, label: str, total_size: int, done_size: int = 0):
        """total_size: of all units, in bytes of the source or whatever they share; 0 if unknown: then no share and no
        remaining time is shown. done_size: of those finished before, which took no time now."""
        self.label = label
        self.total_size, self.done_before = total_size, done_size
        self.done_size = done_size
        self.num_bytes = 0
        self.num_tokens = 0
        self._terminal = sys.stdout.isatty()
        self._start = self._shown = time.monotonic()

    def advance(self, num_bytes: int, num_tokens: int = 0) -> None:
        self.num_bytes += num_bytes
        self.num_tokens += num_tokens
        self._show()

    def finish_unit(self, size: int) -> None:
        """A unit of this size is finished."""
        self.done_size += size
        self._show()

    def close(self) -> None:
        """Clear the line on a terminal."""
        if self._terminal and self._shown > self._start:
            print("\r\033[K", end="", flush=True)

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown > (0.2 if self._terminal else 10.0):
            self._shown = now
            text = self._text(now)
            end = "" if self._terminal else "\n"
            print(f"\r\033[K{text}" if self._terminal else text, end=end, flush=True)

    def _text(self, now: float) -> str:
        elapsed = now - self._start
        text = f"{self.label}: {self.num_bytes / 1e6:,.1f} MB, {self.num_bytes / elapsed / 1e6:,.1f} MB/s"
        if self.num_tokens:
            text += f", {self.num_tokens / 1e6:,.2f} M tokens, {self.num_tokens / elapsed:,.0f} tokens/s"
        if self.total_size and self.done_size:
            text += f", {100 * self.done_size / self.total_size:.0f} %"
            if self.done_size > self.done_before:
                left = (self.total_size - self.done_size) / (self.done_size - self.done_before)
                text += f", {elapsed * left:,.0f} s left"
        return text
