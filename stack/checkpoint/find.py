"""Find the checkpoint to continue from: the newest whole one of a run, or the one that is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.checkpoint.manifest import (
    Manifest,
    read_manifest,
    step_folder_name,
    step_folders,
    stray_files,
    verify_files,
)
from stack.dist.topology import Topology
from stack.errors import CheckpointError

ROUND_BYTES = 16 * 10**9
"""Bytes that a rank checks between two agreements, so that none waits longer than a collective may: 80 s at 200 MB/s."""


@dataclass
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest


def find_checkpoint(
    folder: Path,
    resume: str,
    run: str,
    topology: Topology,
    tell: Callable[[str], None],
    judge: Callable[[Checkpoint], None] | None = None,
) -> Checkpoint | None:
    """The checkpoint that `checkpoint.resume` asks for, or None for a fresh start. Collective; its bytes are verified,
    each rank a share.

    folder: where this run's own checkpoints lie. resume: `auto`, `none`, a step of this run, or a path. run: its name.
    tell: called on rank 0. judge: raises CheckpointError for one that does not fit the run, before its bytes are read.

    Raises CheckpointError, on all ranks alike, if the path or step is no whole checkpoint, if `none` meets checkpoints, or
    if `auto` meets only unusable ones.
    """
    own: list[Path] = topology.broadcast_object(step_folders(folder) if topology.is_main else None)
    say = tell if topology.is_main else _be_silent
    if resume == "none":
        if own:
            raise CheckpointError(
                f"checkpoint.resume=none, but {folder} holds {len(own)} checkpoint(s), newest {own[0].name}. Fix: give "
                "the new run another name, remove the folder, or use checkpoint.resume=auto"
            )
        return None
    if resume == "auto":
        if not own:
            say(f"no checkpoint in {folder}: starting from step 0")
            return None
        found, faults = _newest_good(own, run, topology, say, judge)
        if found is None:
            raise CheckpointError(
                f"none of the {len(own)} checkpoint(s) in {folder} is complete and of this run; the newest: {faults[0]}. "
                "Fix: remove them to start from step 0, give the run another name, or name a whole one: "
                "checkpoint.resume=PATH"
            )
        return found
    return _named(folder, own, resume, run, topology, say, judge)


def _be_silent(text: str) -> None:
    pass


def _newest_good(
    own: Sequence[Path],
    run: str,
    topology: Topology,
    say: Callable[[str], None],
    judge: Callable[[Checkpoint], None] | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """Also why newer ones were passed over. run: only checkpoints of this run count, of any if empty."""
    faults = []
    for path in own:
        found = inspect(path, topology, say, judge, run)
        if not isinstance(found, str):
            return found, faults
        faults.append(found)
        say(f"warning: passing over a checkpoint: {found}")
    return None, faults


def _named(
    folder: Path,
    own: list[Path],
    resume: str,
    run: str,
    topology: Topology,
    say: Callable[[str], None],
    judge: Callable[[Checkpoint], None] | None,
) -> Checkpoint:
    given = folder / step_folder_name(int(resume)) if resume.isdigit() else Path(resume)
    path = given.expanduser().resolve()
    others = [each for each in own if each.resolve() != path]
    found = inspect(path, topology, say, judge)
    if not isinstance(found, str):
        if own and others == own:
            raise CheckpointError(
                f"checkpoint.resume={resume} is none of this run's checkpoints in {folder}, newest {own[0].name}; a restart "
                "would give them up. Fix: checkpoint.resume=auto goes on from the newest; to start from another run's, give "
                "this one another name"
            )
        return found
    # A run's folder in place of a checkpoint's: its newest is named.
    inside = topology.broadcast_object(step_folders(path) or step_folders(path / "checkpoints"))
    good, _ = _newest_good(inside or others, "" if inside else run, topology, _be_silent)
    fix = (
        f"name one checkpoint; the newest whole one: checkpoint.resume={good.path}"
        if good
        else "check the path"
    )
    aside = topology.broadcast_object(sorted(path.parent.glob(f"{path.name}.abandoned*")))
    if aside and not path.exists():
        fix += (
            f". It was set aside when the run went back: {', '.join(each.name for each in aside)}; to take it up again, mv "
            f"{aside[-1]} {path}"
        )
    raise CheckpointError(f"checkpoint.resume={resume}: {found}. Fix: {fix}")


def inspect(
    path: Path,
    topology: Topology,
    say: Callable[[str], None],
    judge: Callable[[Checkpoint], None] | None = None,
    run: str = "",
) -> Checkpoint | str:
    """The checkpoint, or what is wrong with it; the same on every rank. Collective: each rank reads a share of the bytes."""
    found: Manifest | str | None = None
    if topology.is_main:
        try:
            found = read_manifest(path)
        except CheckpointError as error:
            found = str(error)
    found = topology.broadcast_object(found)
    if not isinstance(found, Manifest):
        return str(found)
    if run and found.run and found.run != run:
        return f"{path} is of another run, {found.run!r}"
    if topology.is_main and (strays := stray_files(path, found)):
        say(f"warning: {path} holds files that were not saved with it: {', '.join(strays)}")
    if judge is not None:
        judge(Checkpoint(path, found))
    size, world = sum(found.files.values()), topology.world
    rounds = max(1, math.ceil(size / world / ROUND_BYTES))
    for turn in range(rounds):
        fault = ""
        try:
            verify_files(path, found, turn * world + topology.rank, rounds * world)
        except CheckpointError as error:
            fault = str(error)
        faults = [each for each in topology.gather_objects(fault) if each]
        if faults:
            return "; ".join(each.partition(". Fix: ")[0] for each in faults)
        if rounds > 1:
            say(f"checking {path.name} ({size / 1e9:.0f} GB): {turn + 1} of {rounds} parts")
    return Checkpoint(path, found)
