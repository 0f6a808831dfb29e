"""What only a device shows of fp16 and of host memory: the loss scaler on a card, and copies that run beside the
computation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stack.config.schema import MemoryConfig
from tests.gpu.machine import DEVICE, WORLD
from tests.gpu.rows import LRS, STEPS
from tests.parity import scaling_side, steps_side
from tests.parity.cases import ParityCase
from tests.parity.rank_side import config_of
from tests.parity.steps_side import Step
from tests.ranks import Case, Outcome, run_cases, run_ranks

LAYOUT = "sp2" if WORLD == 2 else "1"
SCALED = [
    ParityCase(LAYOUT, stage, 1, levers, False, "packed")
    for stage, levers in ((1, "none"), (2, "all"), (3, "all"), (3, "lean"))
]
GENERIC = MemoryConfig(tiled_loss=True, loss_tile=100, tiled_mlp=True, mlp_tile=75, checkpointing="full")
MEMORY = {"generic": GENERIC, "lean": replace(GENERIC, lean=True)}
PLACES = {
    "device": dict(offload=False),
    "pinned": dict(offload=True, pin_memory=True),
    "pageable": dict(offload=True, pin_memory=False),
}
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it cuBLAS may take sums in another order from call to call."""


@pytest.fixture(scope="module")
def scaled(folders: dict[bool, str]) -> dict[str, list[Step]]:
    cfgs = {case.name: scaling_side.config(case, folders[False]) for case in SCALED}
    return run_ranks(scaling_side.run, WORLD, cfgs, DEVICE, timeout_s=200, device=DEVICE, init=False)[0]


@pytest.mark.parametrize("case", SCALED, ids=lambda case: case.name)
def test_loss_scaling(case: ParityCase, scaled: dict[str, list[Step]], folders: dict[bool, str]) -> None:
    start, *steps = scaled[case.name]
    scaling_side.assert_scaled_and_learned(start, steps, folders[False])


def run_exactly(*args: object, **kwargs: object) -> list[Step]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return steps_side.run_steps(*args, **kwargs)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def placed(folders: dict[bool, str]) -> dict[str, Outcome]:
    """Training with hidden states of 300 tokens in each place, in bf16, all on one start of the ranks."""
    cases = {}
    for kind, memory in MEMORY.items():
        for place, settings in PLACES.items():
            cfg = config_of(ParityCase(LAYOUT, 3, 1, "none", False, ""), folders[False], "bf16")
            cfg = replace(cfg, memory=replace(memory, **settings))
            cases[f"{kind} {place}"] = Case(run_exactly, (cfg, STEPS, LRS), dict(size=2, device=DEVICE))
    return run_cases(WORLD, cases, timeout_s=200, device=DEVICE, init=False, env=EXACT)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "device"])
@pytest.mark.parametrize("kind", MEMORY)
def test_offload_changes_no_bit(placed: dict[str, Outcome], kind: str, place: str) -> None:
    want, got = placed[f"{kind} device"].get()[0], placed[f"{kind} {place}"].get()[0]
    assert [step.loss for step in got] == [step.loss for step in want]
    assert [step.result.grad_norm for step in got] == [step.result.grad_norm for step in want]
    for name, weight in want[-1].weights.items():
        assert torch.equal(got[-1].weights[name], weight), name
