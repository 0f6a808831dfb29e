"""Which checkpoints stay: newest, best and milestones, and never one that this run did not write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stack.checkpoint.retention import kept_steps
from stack.config.schema_checkpoint import CheckpointConfig
from tests.unit.saving_rig import names, save_steps

STEPS = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 4.0}


@pytest.mark.parametrize(
    "policy, kept",
    [
        (dict(keep=0), {10, 20, 30, 40, 50}),
        (dict(keep=1), {50}),
        (dict(keep=3), {30, 40, 50}),
        (dict(keep=9), {10, 20, 30, 40, 50}),
        (dict(keep=1, keep_every=20), {20, 40, 50}),
        (dict(keep=1, keep_best=1), {20, 50}),
        (dict(keep=1, keep_best=2), {20, 40, 50}),
        (dict(keep=1, keep_best=9), {10, 20, 40, 50}),
        (dict(keep=2, keep_every=30, keep_best=1), {20, 30, 40, 50}),
    ],
)
def test_newest_best_and_milestones_are_kept_all_at_once(policy: dict[str, Any], kept: set[int]) -> None:
    assert kept_steps(STEPS, 50, CheckpointConfig(**policy)) == kept


def test_of_equal_values_the_newer_is_the_better_and_the_one_just_saved_always_stays() -> None:
    assert kept_steps({1: 2.0, 2: 2.0, 3: 5.0}, 3, CheckpointConfig(keep=1, keep_best=1)) == {2, 3}
    assert kept_steps({3: None, 5: None, 12: None}, 3, CheckpointConfig(keep=1)) == {3}


def test_retention_on_disk(tmp_path: Path) -> None:
    losses = {2: 1.0, 3: 0.5, 6: 0.9}
    save_steps(tmp_path, 1, 2, 3, 4, 5, 6, losses=losses, keep=1, keep_every=4, keep_best=1)
    assert names(tmp_path) == ["step_000003", "step_000004", "step_000006"]


def test_retention_leaves_what_is_foreign_or_unreadable(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=0)
    other = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())
    other["run"] = "theirs"
    del other["digest"], other["checksums"]
    (tmp_path / "step_000001" / "manifest.json").write_text(json.dumps(other))
    (tmp_path / "step_000002" / "manifest.json").unlink()
    (tmp_path / "notes").mkdir()
    save_steps(tmp_path, 4, 5, keep=1)
    assert names(tmp_path) == ["notes", "step_000001", "step_000002", "step_000005"]
