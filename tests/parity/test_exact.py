"""The exact forecast counts what real ranks take: to the byte, in every phase of two steps."""

from __future__ import annotations

import pytest

from stack.bench.step_count import StepCount
from tests.parity.exact_side import counted_alone, counted_for_real
from tests.ranks import Case, run_cases, run_ranks

SMALL = [
    *(
        "model=bench",
        "model.architecture.num_hidden_layers=2",
        "data=random",
        "engine=zero3",
        "schedule.steps=1",
    ),
    "data.seq_len=768",
]
EXPERTS = [
    *("model.architecture.model_type=qwen3_moe", "+model.architecture.num_experts=4"),
    *("+model.architecture.num_experts_per_tok=2", "+model.architecture.moe_intermediate_size=128"),
    "data.seq_len=256",
]
CASES = {
    "plain": ["memory=plain"],
    "checkpoint, accumulation 2, sp 2": ["memory=checkpoint", "engine.accumulation=2", "parallel.sp=2"],
    "alst, sp 2": ["memory=alst", "parallel.sp=2", "memory.mlp_tile=128", "memory.loss_tile=250"],
    "alst, packed, fp32": ["memory=alst", "data.random_document_tokens=200", "engine.precision=fp32"],
    "lean, packed, accumulation 2": [
        *("memory=lean", "data.random_document_tokens=300", "engine.accumulation=2", "memory.mlp_tile=400"),
    ],
    "lean, tied, sp 2": ["memory=lean", "parallel.sp=2", "model.architecture.tie_word_embeddings=true"],
    "plain, tied, zero2, 2 rows": [
        *(
            "memory=plain",
            "engine=zero2",
            "model.architecture.tie_word_embeddings=true",
            "data.micro_batch=2",
        ),
    ],
    "lean, experts, sp 2": ["memory=lean", "parallel.sp=2", "memory.mlp_tile=100", *EXPERTS],
    "alst, experts, accumulation 2": [
        *("memory=alst", "engine.accumulation=2", "memory.mlp_tile=200", "memory.loss_tile=250", *EXPERTS),
    ],
    "lean, small buckets, frozen, sp 2": [
        *("memory=lean", "parallel.sp=2", "+engine.overrides.zero_optimization.reduce_bucket_size=200000"),
        "model.freeze=[*embed*]",
    ],
}
GIVEN = {name: [*SMALL, *case] for name, case in CASES.items()}
BUFFERS = 128
"""Bytes of the rotary frequencies, which are there before the count, and below ZeRO-3 move to the device within it."""


@pytest.fixture(scope="module")
def real() -> dict[str, StepCount]:
    cases = {name: Case(counted_for_real, (given,)) for name, given in GIVEN.items()}
    outcomes = run_cases(2, cases)
    return {name: outcome.get()[0] for name, outcome in outcomes.items()}


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, StepCount], dict[str, StepCount]]:
    """As on CPU ranks, and on the virtual device."""
    first, second = run_ranks(counted_alone, 2, GIVEN, 2, init=False)
    return first, second


def phases(found: StepCount) -> dict[str, int]:
    """Most bytes of every phase of both steps."""
    steps = {"cold": found.cold, "warm": found.warm}
    return {"init": found.init.num_bytes} | {
        f"{step} {phase}": most.num_bytes
        for step, counted in steps.items()
        for phase, most in counted.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_equals_real_ranks_to_the_byte(
    name: str, real: dict[str, StepCount], alone: tuple[dict[str, StepCount], ...]
) -> None:
    counted, true = alone[0][name], real[name]
    assert list(phases(true)) == [
        "init",
        *(
            f"{step} {phase}"
            for step in ("cold", "warm")
            for phase in ("forward", "loss", "backward", "optimizer")
        ),
    ]
    assert phases(counted) == phases(true)
    assert counted.states_bytes == true.states_bytes
    assert counted.host == true.host
    assert counted.flops == true.flops
    assert counted.traffic == true.traffic
    assert min(true.flops.values()) > 0 and true.traffic["all-gather"] > 1e6


@pytest.mark.parametrize("name", CASES)
def test_the_virtual_device_holds_the_same_but_for_what_is_on_the_host(
    name: str, alone: tuple[dict[str, StepCount], ...]
) -> None:
    """Row ids and counters wait on the host, where on CPU ranks host and device are one."""
    there, virtual = alone[0][name], alone[1][name]
    for phase, num_bytes in phases(there).items():
        assert -BUFFERS <= num_bytes - phases(virtual)[phase] <= virtual.host["other"] < 60_000, phase
    kept = "kept activations"
    assert virtual.host.get(kept, 0) == there.host.get(kept, 0)
    assert (virtual.flops, virtual.traffic) == (there.flops, there.traffic)
    assert virtual.copied_bytes >= 2 * virtual.host.get(kept, 0) and there.copied_bytes == 0
