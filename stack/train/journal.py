"""`metrics.jsonl` in the run folder: one line a step, each step once, also after restarts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stack.checkpoint.state import TrainState


class JournalHook:
    """Appends each step's record. Rank 0 only.

    Lines behind `resume_step` come from a course that was given up at the last restart, and are removed at the start.
    """

    def __init__(self, path: Path, resume_step: int):
        if path.exists():
            _truncate(path, resume_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def after_step(self, state: TrainState, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The records in file order. A last line that was cut short, by a full disk or a kill, is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _truncate(path: Path, resume_step: int) -> None:
    kept = [record for record in read_journal(path) if record["step"] <= resume_step]
    part = path.with_name(f"{path.name}.partial")
    part.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(part, path)
