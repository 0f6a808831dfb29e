"""The table of tests/parity on GPUs: with one, all its cases on one rank; with two or four, those of two and four as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.machine import COUNT, DEVICE
from tests.parity import reference
from tests.parity.cases import FACTORS, TABLE, ParityCase
from tests.parity.rank_side import Curve, run_table
from tests.ranks import run_ranks

ON_ONE = list(dict.fromkeys(replace(case, layout="1") for case in TABLE))
CASES = ON_ONE + [case for case in TABLE if 1 < case.world <= COUNT]
# Sums on a GPU are taken in another order than in the judge's float64 on the CPU, and exp is a little coarser: ten times
# what the CPU ranks are allowed. What the levers and layouts can do wrong is off by percents.
LOSS, NORM, GRADIENT, WEIGHT = 1e-5, 1e-4, 1e-4, 1e-4


@pytest.fixture(scope="module")
def outcomes(folders) -> dict[str, Curve | str]:
    """All cases, on one start of the ranks for each number of them."""
    found: dict[str, Curve | str] = {}
    for world in sorted({case.world for case in CASES}):
        cases = [case for case in CASES if case.world == world]
        on_ranks = run_ranks(
            run_table, world, cases, folders, DEVICE, timeout_s=200, device=DEVICE, init=False
        )
        found |= on_ranks[0]
    return found


@pytest.fixture(scope="module")
def judged(folders) -> dict[tuple[bool, str], reference.Curve]:
    return {
        (tied, text): reference.train(
            reference.load(folders[tied]), reference.make_steps(text), reference.LRS
        )
        for tied in FACTORS["tied"]
        for text in FACTORS["text"]
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trains_as_one_plain_process(
    case: ParityCase,
    outcomes: dict[str, Curve | str],
    judged: dict[tuple[bool, str], reference.Curve],
) -> None:
    got, want = outcomes[case.name], judged[case.tied, case.text]
    if isinstance(got, str):
        pytest.fail(got)
    assert got.losses == pytest.approx(want.losses, rel=LOSS)
    assert got.norms == pytest.approx(want.norms, rel=NORM)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in want.grads.items():
        error = (got.grads[name].double() - grad).norm() / grad.norm()
        assert error < GRADIENT, f"{name}: relative error {error:.1e}"
    for name, weight in want.weights.items():
        torch.testing.assert_close(got.weights[name].double(), weight, rtol=0, atol=WEIGHT, msg=name)
