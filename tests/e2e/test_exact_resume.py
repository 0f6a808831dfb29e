"""A resumed run is the unbroken one to the last bit: loss, norm, learning rate, counters, held-out loss and weights, with
dropout on, in warmup and in the middle of an epoch, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import exact_side
from tests.e2e.exact_side import STEPS, STOP
from tests.ranks import run_ranks

COMMON = [
    "data.seq_len=61",  # two ranks do not divide it
    "data.random_tokens=600",  # an epoch ends within the run, at no checkpoint
    "data.eval_fraction=0.1",
    "log.eval_rows=2",
    "log.eval_every=2",
    "log.wandb=disabled",
    "schedule.warmup_steps=4",
    "memory.loss_tile=16",
    "memory.mlp_tile=16",
]
DROPOUT = "+model.architecture.attention_dropout=0.2"
NEOX = [
    "model.architecture.model_type=gpt_neox",
    "+model.architecture.hidden_dropout=0.1",
    DROPOUT,
    "~model.architecture.num_key_value_heads",
    "~model.architecture.head_dim",
]


def case(stage: int, precision: str, sp: int, *more: str) -> tuple[str, list[str]]:
    words = [f"engine=zero{stage}", f"engine.precision={precision}", f"parallel.sp={sp}", *more]
    return " ".join(words), [*COMMON, *words]


CASES = dict(
    [
        case(0, "fp32", 1, DROPOUT),
        case(0, "bf16", 2, DROPOUT),
        case(1, "bf16", 1, DROPOUT, "engine.accumulation=2"),
        case(1, "fp32", 2, *NEOX),
        case(2, "fp32", 1, DROPOUT, "memory=plain"),
        case(2, "bf16", 2, DROPOUT, "engine.accumulation=2"),
        case(3, "bf16", 1, *NEOX),
        case(3, "fp32", 2, DROPOUT),
        case(3, "bf16", 2, "memory=lean"),
    ]
)


WHOLE = "saved on two ranks"
SAVED = [*COMMON, "engine=zero3", "parallel.sp=2", "engine.accumulation=2"]
ELSEWHERE = {
    "zero2, sp2": ["engine=zero2", "parallel.sp=2", "engine.accumulation=1"],
    "zero3, sp4": ["engine=zero3", "parallel.sp=4", "engine.accumulation=2"],
}
"""On four ranks. Each reads the two rows a step that the first run reads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def outcomes(folder: str) -> dict[str, list[dict[str, Any]]]:
    cases = CASES | {WHOLE: SAVED}
    return run_ranks(exact_side.straight_and_resumed, 2, folder, cases, init=False)[0]


@pytest.fixture(scope="module")
def elsewhere(folder: str, outcomes: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    cases = {name: [*COMMON, *words] for name, words in ELSEWHERE.items()}
    args = (folder, len(CASES), cases)
    return run_ranks(exact_side.resumed_elsewhere, 4, *args, init=False)[0]


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_is_the_straight_one(outcomes: dict[str, list[dict[str, Any]]], name: str) -> None:
    straight, resumed = outcomes[name]
    assert [line["step"] for line in straight["journal"]] == list(range(1, STEPS + 1))
    assert resumed["journal"] == straight["journal"][STOP:]
    assert resumed["weights"] == straight["weights"]
    assert len({line["lr"] for line in straight["journal"]}) > 3, "in warmup the rates differ"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_on_four_ranks_the_data_goes_on_exactly_and_the_numbers_to_rounding(
    outcomes: dict[str, list[dict[str, Any]]], elsewhere: dict[str, dict[str, Any]], name: str
) -> None:
    straight, other = outcomes[WHOLE][0]["journal"][STOP:], elsewhere[name]["journal"]
    for key in ("step", "lr", "rows", "tokens", "targets", "tokens_total", "targets_total"):
        assert [line[key] for line in other] == [line[key] for line in straight], key
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in other] == pytest.approx([line[key] for line in straight], rel=1e-5)
    measured = [line["eval_loss"] for line in straight if "eval_loss" in line]
    assert [line["eval_loss"] for line in other if "eval_loss" in line] == pytest.approx(measured, rel=1e-5)
    assert (
        f"reading step_{STOP:06d} parameter by parameter: saved on 2 rank(s), SP 2, ZeRO-3"
        in elsewhere[name]["output"]
    )
