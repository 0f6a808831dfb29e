"""Every layout, stage, lever and batch shape trains as one plain process does: losses, gradients, weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity import reference
from tests.parity.cases import FACTORS, TABLE, ParityCase, pairs_of
from tests.parity.rank_side import Curve, run_table
from tests.ranks import run_ranks

SHAPE = dict(
    vocab_size=reference.VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[bool, str]:
    """A tied and an untied Qwen3, saved; weights larger than a fresh model's, so that attention is not uniform."""
    saved = {}
    for tied in (False, True):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", tie_word_embeddings=tied, **SHAPE))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.1)
        saved[tied] = str(tmp_path_factory.mktemp("models") / f"tied-{tied}")
        model.save_pretrained(saved[tied])
    return saved


@pytest.fixture(scope="session")
def judged(folders) -> dict[tuple[bool, str], reference.Curve]:
    return {
        (tied, text): reference.train(Path(folders[tied]), text) for tied in FACTORS["tied"] for text in FACTORS["text"]
    }


@pytest.fixture(scope="session")
def outcomes(folders) -> dict[int, list[dict]]:
    return {}


def outcome_of(case: ParityCase, outcomes: dict[int, list[dict]], folders: dict[bool, str]) -> Curve:
    if case.world not in outcomes:
        cases = [other for other in TABLE if other.world == case.world]
        outcomes[case.world] = run_ranks(run_table, case.world, cases, folders, timeout_s=600, init=False)
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
