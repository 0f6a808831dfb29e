"""fp16 at every stage that takes it: steps that the loss scaler skips, and exact learning behind them."""

from __future__ import annotations

import pytest

from tests.parity import scaling_side
from tests.parity.cases import ParityCase
from tests.ranks import run_ranks

CASES = [
    ParityCase("sp2", stage, 1, levers, False, "packed")
    for stage, levers in ((1, "none"), (2, "all"), (3, "all"), (3, "lean"))
]


@pytest.fixture(scope="module")
def runs(folders):
    cfgs = {case.name: scaling_side.config(case, folders[False]) for case in CASES}
    return run_ranks(scaling_side.run, 2, cfgs, init=False)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_scaling(runs, folders, case):
    start, *steps = runs[case.name]
    scaling_side.assert_scaled_and_learned(start, steps, folders[False])
