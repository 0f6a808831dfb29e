"""Every layout, stage, lever and batch shape trains as one plain process does: losses, gradients, weights."""

from __future__ import annotations

import pytest
import torch

from tests.parity import reference
from tests.parity.cases import FACTORS, TABLE, ParityCase, pairs_of
from tests.parity.rank_side import Curve, run_table
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def judged(folders) -> dict[tuple[bool, str], reference.Curve]:
    return {
        (tied, text): reference.train(
            reference.load(folders[tied]), reference.make_steps(text), reference.LRS
        )
        for tied in FACTORS["tied"]
        for text in FACTORS["text"]
    }


@pytest.fixture(scope="session")
def outcomes(folders) -> dict[int, list[dict]]:
    return {}


def outcome_of(case: ParityCase, outcomes: dict[int, list[dict]], folders: dict[bool, str]) -> Curve:
    if case.world not in outcomes:
        cases = [other for other in TABLE if other.world == case.world]
        outcomes[case.world] = run_ranks(run_table, case.world, cases, folders, init=False)
    on_main = outcomes[case.world][0][case.name]
    if isinstance(on_main, str):
        pytest.fail(on_main)
    return on_main


def test_every_pair_of_values_is_in_the_table():
    seen = set().union(*(pairs_of({name: getattr(case, name) for name in FACTORS}) for case in TABLE))
    names = list(FACTORS)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            for pair in [((first, a), (second, b)) for a in FACTORS[first] for b in FACTORS[second]]:
                assert pair in seen


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_trains_as_one_plain_process(case, outcomes, folders, judged):
    got, want = outcome_of(case, outcomes, folders), judged[case.tied, case.text]
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    assert got.norms == pytest.approx(want.norms, rel=1e-5)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in want.grads.items():
        error = (got.grads[name].double() - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"
    for name, weight in want.weights.items():
        torch.testing.assert_close(got.weights[name].double(), weight, rtol=0, atol=1e-5, msg=name)
