"""`job.jsonl` in a run folder: what happened to its jobs, a line an event, written by `launch/slurm/job.sh`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "job.jsonl"
ENDS = ("done", "stopped", "gave_up", "failed", "preflight failed", "not requeued")


@dataclass(frozen=True)
class Event:
    """One line. `name`: submitted, start, goes on, or one of ENDS."""

    name: str
    time: str
    job: str
    restart: int
    checkpoint: int
    """Step of the newest checkpoint at that time, 0 if there was none."""
    details: dict[str, Any]


def read_record(folder: Path) -> list[Event]:
    """The events in order; a line that was cut short by a kill is left out."""
    path = folder / FILE_NAME
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [event for event in map(_parse, lines) if event is not None]


def _parse(line: str) -> Event | None:
    try:
        fields = dict(json.loads(line))
        return Event(
            name=str(fields.pop("event")),
            time=str(fields.pop("time", "")),
            job=str(fields.pop("job", "")),
            restart=int(fields.pop("restart", 0)),
            checkpoint=int(fields.pop("checkpoint", 0)),
            details=fields,
        )
    except (ValueError, TypeError, KeyError):
        return None


def unfinished_jobs(events: list[Event]) -> list[str]:
    """The job of the last event and the one chained behind it, unless that event says that all is over for good."""
    if not events or events[-1].name in ENDS:
        return []
    job = events[-1].job
    chained = [event.details["next"] for event in events if event.job == job and "next" in event.details]
    return [job, *dict.fromkeys(chained)]


def append(folder: Path, event: str, job: str, time: str, **details: str) -> None:
    """A line from outside the job. Raises OSError."""
    fields = {"event": event, "time": time, "job": job, **details}
    with open(folder / FILE_NAME, "a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")
