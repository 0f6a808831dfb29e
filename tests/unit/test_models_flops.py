"""FLOPs against torch's own counter, and the conventions by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stack.models import spec
from stack.models.build import build_model
from stack.models.flops import forward_flops, hardware_flops, model_flops
from tests.unit.models_rig import scratch

LENGTH = 12


def counted(family: str, backward: bool) -> tuple[int, spec.ModelSpec]:
    built = build_model(scratch(family), 32, torch.float32, 0)
    # The counter knows neither sdpa's kernel for the CPU nor grouped experts.
    built.model.config._attn_implementation = built.model.config._experts_implementation = "eager"
    ids = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as counter:
        loss = built.model(input_ids=ids, labels=ids, use_cache=False).loss
        if backward:
            loss.backward()
    return counter.get_total_flops(), built.spec


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "granite", "qwen3_moe", "mixtral"])
def test_forward_equals_the_counter(family: str) -> None:
    """The counter charges attention for the whole square of the length, the convention for half of it."""
    total, known = counted(family, backward=False)
    flops = forward_flops(known, [LENGTH])
    assert flops.total + flops.attention == total


def test_forward_and_backward_equal_the_counter() -> None:
    total, known = counted("qwen3", backward=True)
    assert model_flops(known, [LENGTH]) + 3 * forward_flops(known, [LENGTH]).attention == total


def test_by_hand() -> None:
    known = build_model(scratch(), 32, torch.float32, 0).spec
    flops = forward_flops(known, [10, 6])
    assert flops.projections == 2 * 16 * 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32)
    assert flops.mlp == 2 * 16 * 2 * (3 * 32 * 48)
    assert flops.head == 2 * 16 * 64 * 32
    assert flops.attention == 2 * 2 * 2 * 32 * (10 * 10 + 6 * 6) // 2
    assert flops.total == flops.projections + flops.mlp + flops.head + flops.attention


def test_experts_count_for_the_tokens_that_meet_them() -> None:
    known = build_model(scratch("qwen3_moe"), 32, torch.float32, 0).spec
    assert known.mlp_weights == 2 * (2 * 3 * 32 * 24 + 4 * 32)


def test_a_packed_row_costs_what_its_documents_cost() -> None:
    known = build_model(scratch(), 32, torch.float32, 0).spec
    alone = [model_flops(known, [length]) for length in (5, 1, 7)]
    assert model_flops(known, [5, 1, 7]) == sum(alone)
    assert model_flops(known, []) == 0


def test_a_window_bounds_the_pairs() -> None:
    known = build_model(scratch(), 32, torch.float32, 0).spec
    banded = dataclasses.replace(known, windows=(4, None))
    flops = forward_flops(banded, [3, 10])
    assert flops.attention == 4 * 32 * ((9 + 100) / 2 + 9 / 2 + (4 * 10 - 8))
    assert forward_flops(banded, [4]) == forward_flops(known, [4])


def test_what_the_levers_recompute() -> None:
    known = build_model(scratch(), 32, torch.float32, 0).spec
    flops = forward_flops(known, [LENGTH])
    assert hardware_flops(known, [LENGTH], checkpointing=False, tiled_mlp=False) == 3 * flops.total
    assert hardware_flops(known, [LENGTH], checkpointing=False, tiled_mlp=True) == 3 * flops.total + flops.mlp
    for tiled_mlp in (False, True):
        recomputed = (
            hardware_flops(known, [LENGTH], checkpointing=True, tiled_mlp=tiled_mlp) - 3 * flops.total
        )
        assert recomputed == flops.total - flops.head
