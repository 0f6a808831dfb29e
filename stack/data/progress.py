"""A line that says how far long work has come: rewritten in place on a terminal, every 10 s elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts bytes of text and tokens of one pass over a source."""

    def __init__(self, label: str, total_bytes: int):
        """total_bytes: 0 if unknown; then no share and no remaining time is shown."""
        self.label = label
        self.total_bytes = total_bytes
        self.num_bytes = 0
        self.num_tokens = 0
        self._terminal = sys.stdout.isatty()
        self._start = self._shown = time.monotonic()

    def advance(self, num_bytes: int, num_tokens: int = 0) -> None:
        self.num_bytes += num_bytes
        self.num_tokens += num_tokens
        now = time.monotonic()
        if now - self._shown > (0.2 if self._terminal else 10.0):
            self._shown = now
            self._show(self._text(now))

    def close(self) -> None:
        """Clear the line on a terminal."""
        if self._terminal and self._shown > self._start:
            print("\r\033[K", end="", flush=True)

    def _show(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._terminal else text, end="" if self._terminal else "\n", flush=True)

    def _text(self, now: float) -> str:
        elapsed = now - self._start
        text = f"{self.label}: {self.num_bytes / 1e6:,.1f} MB, {self.num_bytes / elapsed / 1e6:,.1f} MB/s"
        if self.num_tokens:
            text += f", {self.num_tokens / 1e6:,.2f} M tokens, {self.num_tokens / elapsed:,.0f} tokens/s"
        if self.total_bytes and self.num_bytes:
            left_s = elapsed * max(self.total_bytes / self.num_bytes - 1, 0)
            text += f", {100 * min(self.num_bytes / self.total_bytes, 1):.0f} %, {left_s:,.0f} s left"
        return text
