"""`metrics.jsonl` in the run folder: one line a step, each step once, also after restarts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stack.checkpoint.publish import free_name
from stack.checkpoint.state import TrainState
from stack.errors import LaunchError
from stack.train.console import tell
from stack.train.folder import write_whole


class JournalHook:
    """Appends each step's record. Rank 0 only.

    Lines behind `resume_step` come from a course that was given up at the last restart, and are removed at the start.
    A disk that takes no lines for a while ends no run: they are kept in memory and written when it takes them again.
    """

    def __init__(self, path: Path, resume_step: int, tell: Callable[[str], None] = tell):
        """Raises LaunchError if the journal cannot be written at the start."""
        self._path, self._tell = path, tell
        self._waiting, self._failing = b"", False
        try:
            if path.exists():
                _truncate(path, resume_step, tell)
            # Without a buffer, so that it is known which bytes a full disk has taken.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be written: {error}. Fix: free some space or mend the permissions, or set `out` to a folder "
                "that can be written"
            ) from error

    def after_step(self, state: TrainState, record: dict[str, Any]) -> None:
        self._waiting += (json.dumps(record) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                self._tell(
                    f"warning: {self._path} takes no lines ({error}); they are kept in memory, and tried again at each step"
                )
            self._failing = True

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        if self._failing:
            self._failing = False
            self._tell(f"{self._path} takes lines again: none is missing")

    def close(self) -> None:
        try:
            self._write()
            self._file.close()
        except OSError as error:
            steps = self._waiting.count(b"\n")
            self._tell(f"warning: the last {steps} step(s) could not be written to {self._path}: {error}")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The records in file order. What is no record is left out, such as a last line that was cut short by a kill."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The records, and the numbers of the lines that are none, from 1; a last line that was cut short is not counted."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else [""]
    parsed = [_parse(line) for line in lines]
    damaged = [number for number, record in enumerate(parsed[:-1], start=1) if record is None]
    return [record for record in parsed if record is not None], damaged


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _truncate(path: Path, resume_step: int, tell: Callable[[str], None]) -> None:
    records, damaged = _read(path)
    if damaged:
        kept = free_name(path, "damaged")
        shutil.copyfile(path, kept)
        numbers = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
        tell(
            f"warning: {len(damaged)} line(s) of {path} are no records and are left out (line {numbers}); the file as it was "
            f"is {kept.name}"
        )
    lines = [json.dumps(record) + "\n" for record in records if record["step"] <= resume_step]
    write_whole(path, "".join(lines))
