"""Where a run stands: its jobs, its step, and how to go on, from the files of its folder and from Slurm if it is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from stack.submit.batch import state_of
from stack.submit.record import Event, read_record, unfinished_jobs

SHOWN = 12  # events, from the newest back
TAIL_BYTES = 65536  # of the journal: its last record is asked for, and it may be large


def describe(folder: Path, ask: Callable[[str], str | None] = state_of) -> str:
    """The status of the run in `folder`, for a person. ask: gives the state of a job that Slurm knows."""
    events = read_record(folder)
    lines = [f"run {folder.name} in {folder}", f"  {_state(folder, events, ask)}", f"  {_progress(folder)}"]
    starts = [event for event in events if event.name == "start"]
    if starts:
        lost = _lost(events)
        jobs = dict.fromkeys(event.job for event in starts)
        lines.append(
            f"  {len(starts)} start(s) in {len(jobs)} job(s), {lost} of them ended without a word of their own"
        )
    logs = sorted(folder.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    if logs:
        lines.append(f"  log: {logs[-1]}")
    for event in events[-SHOWN:]:
        details = ", ".join(f"{key} {value}" for key, value in event.details.items() if value != "")
        lines.append(
            f"  {event.time}  job {event.job:<8} {event.name}, checkpoint {event.checkpoint}; {details}".rstrip(
                "; "
            )
        )
    return "\n".join(lines)


def _state(folder: Path, events: list[Event], ask: Callable[[str], str | None]) -> str:
    jobs = unfinished_jobs(events)
    for job in jobs:
        if (state := ask(job)) is not None:
            return f"job {job}: {state}"
    if not events:
        return "no job has written into this folder yet"
    last = events[-1]
    if last.name == "done":
        return f"done, in job {last.job}"
    stopped = _stopped(folder)
    if last.name == "stopped" or (stopped and last.name == "goes on"):  # else it may be of an earlier start
        return f"stopped at step {stopped.get('step', '?')} ({stopped.get('reason', '?')}); the same command goes on"
    if jobs:
        return f"job {last.job} is not known to Slurm any more; its last word was `{last.name}`. The same command goes on"
    return f"{last.name.replace('_', ' ')} in job {last.job}; its log says why. Once that is mended the same command goes on"


def _lost(events: list[Event]) -> int:
    """Starts behind which another start came without an end between: a lost node, or a kill."""
    names = [event.name for event in events if event.name != "submitted"]
    return sum(one == other == "start" for one, other in zip(names, names[1:], strict=False))


def _progress(folder: Path) -> str:
    record = _last_record(folder / "metrics.jsonl")
    if record is None:
        return "no step yet"
    total = _planned(folder)
    parts = [f"step {record['step']}{f' of {total}' if total else ''}"]
    if isinstance(record.get("loss"), float):
        parts.append(f"loss {record['loss']:.4f}")
    if isinstance(record.get("step_s"), float):
        parts.append(f"{record['step_s']:.3g} s a step")
        if total and record["step"] < total:
            parts.append(f"about {(total - record['step']) * record['step_s'] / 3600:.1f} h to go")
    return ", ".join(parts)


def _last_record(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # cut short by a kill, or by the seek
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            return record
    return None


def _planned(folder: Path) -> int | None:
    """Steps of the run, where its settings say it in steps."""
    path = folder / "config.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    return (settings or {}).get("schedule", {}).get("steps")


def _stopped(folder: Path) -> dict[str, Any]:
    path = folder / "stopped.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
