"""Which checkpoints stay: the newest, the best, and every K-th, all three at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stack.checkpoint.manifest import Manifest, read_manifest, step_folders
from stack.checkpoint.publish import remove_tree
from stack.config.schema_checkpoint import CheckpointConfig
from stack.errors import CheckpointError


def kept_steps(metrics: Mapping[int, float | None], newest: int, policy: CheckpointConfig) -> set[int]:
    """The steps to keep.

    metrics: step -> `policy.best_metric` there, None where it was not measured. newest: the step saved last, which stays in
    any case and counts as the first of `policy.keep`.
    """
    if policy.keep == 0:
        return set(metrics)
    latest = sorted((step for step in metrics if step != newest), reverse=True)[: policy.keep - 1]
    measured = [(value, -step) for step, value in metrics.items() if value is not None]
    best = [-step for _, step in sorted(measured)[: policy.keep_best]]
    milestones = [step for step in metrics if policy.keep_every and step % policy.keep_every == 0]
    return {newest, *latest, *best, *milestones}


def delete_old(
    folder: Path, run: str, newest: int, policy: CheckpointConfig, spare: Path | None = None
) -> None:
    """Delete the complete checkpoints of this run that `policy` does not keep.

    What another run wrote stays, and so does what cannot be read, since nobody can say whose it is. spare: a checkpoint
    that is being copied elsewhere. Raises OSError if a folder cannot be deleted.
    """
    own = {path: manifest for path in step_folders(folder) if (manifest := _of_run(path, run))}
    metrics = {manifest.step: manifest.metrics.get(policy.best_metric) for manifest in own.values()}
    kept = kept_steps(metrics, newest, policy)
    for path, manifest in own.items():
        if manifest.step not in kept and path != spare:
            # Renamed first, so that a deletion that is cut short leaves nothing that looks like a checkpoint.
            remove_tree(path.rename(path.with_name(f"{path.name}.partial")))


def _of_run(path: Path, run: str) -> Manifest | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None
    return manifest if manifest.run == run else None
