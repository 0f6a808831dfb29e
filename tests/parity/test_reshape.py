"""Checkpoints that are cut anew: every stored value arrives to the last bit, whatever the ZeRO stage and number of ranks,
and the steps behind are those of the unbroken run.

`python -m tests.parity.test_reshape` runs all pairs of shapes (5 min); here is one launch of ranks for each side.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from tests.parity import reshape_side
from tests.parity.reshape_side import Seen, Shape
from tests.ranks import run_ranks

SAVED = [Shape(2, 1, 0, "bf16"), Shape(2, 1, 1, "bf16"), Shape(2, 2, 2, "fp32"), Shape(2, 1, 3, "fp32")]
IN_MEMORY, ON_DISK = Shape(2, 1, 3, "bf16"), Shape(2, 1, 3, "bf16", "nvme")
PAIRS = [
    (SAVED[0], Shape(3, 1, 3, "bf16")),  # three ranks divide no parameter
    (SAVED[1], Shape(3, 1, 2, "bf16")),
    (SAVED[1], Shape(3, 1, 3, "fp32")),  # another type: the fp32 masters go on
    (SAVED[2], Shape(3, 1, 0, "fp32")),
    (SAVED[3], Shape(3, 1, 1, "fp32")),
    (ON_DISK, Shape(3, 1, 3, "bf16", "nvme")),
    (ON_DISK, Shape(3, 1, 1, "bf16")),
    (SAVED[0], Shape(3, 1, 3, "bf16", "pipeline")),
    (SAVED[3], Shape(3, 1, 3, "fp32", "nvme")),
]
ROUNDING = {"fp32": 1e-5, "bf16": 1e-3}


def check(before: Seen, after: Seen, precision: str) -> None:
    """Raises AssertionError."""
    assert after.stored.keys() == before.stored.keys() and (after.step, after.lr) == (before.step, before.lr)
    assert [key for key, value in before.stored.items() if not torch.equal(after.stored[key], value)] == []
    assert after.losses == pytest.approx(before.losses, rel=ROUNDING[precision])


def run_pairs(folder: str, out: str, saved: list[Shape], pairs: list[tuple[Shape, Shape]]) -> dict[Any, Seen]:
    found: dict[Any, Seen] = {}
    for world in sorted({shape.world for shape in saved}):
        mine = [shape for shape in saved if shape.world == world]
        found |= run_ranks(reshape_side.save_and_go_on, world, folder, out, mine, timeout_s=900, init=False)[
            0
        ]
    for world in sorted({target.world for _, target in pairs}):
        chosen = [pair for pair in pairs if pair[1].world == world]
        found |= run_ranks(
            reshape_side.fill_and_go_on, world, folder, out, chosen, timeout_s=900, init=False
        )[0]
    return found


@pytest.fixture(scope="module")
def seen(folders: dict[bool, str], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Seen]:
    saved = [*SAVED, IN_MEMORY, ON_DISK]
    return run_pairs(folders[True], str(tmp_path_factory.mktemp("saved")), saved, PAIRS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name} to {pair[1].name}")
def test_everything_stored_arrives_and_training_goes_on(
    seen: dict[Any, Seen], pair: tuple[Shape, Shape]
) -> None:
    source, target = pair
    check(seen[source.name], seen[source.name, target.name], source.precision)


def test_states_on_a_disk_leave_the_checkpoint_of_states_in_memory(seen: dict[Any, Seen]) -> None:
    check(seen[IN_MEMORY.name], seen[ON_DISK.name], "bf16")


def main() -> None:
    """All pairs, from two ranks to one, two, three and four."""
    from tests.parity.conftest import save_model

    saved = [Shape(2, sp, stage, kind) for sp in (1, 2) for stage in range(4) for kind in ("fp32", "bf16")]
    targets = [
        Shape(world, sp, stage, kind)
        for world, sp in ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))
        for stage in range(4)
        for kind in ("fp32", "bf16")
    ]
    pairs = [(one, other) for one in saved for other in targets if one.precision == other.precision]
    with tempfile.TemporaryDirectory() as folder:
        found = run_pairs(save_model(f"{folder}/model", tied=True), folder, saved, pairs)
    for source, target in pairs:
        check(found[source.name], found[source.name, target.name], source.precision)
    print(f"{len(pairs)} pairs of shapes: every stored value arrived to the last bit")


if __name__ == "__main__":
    main()
