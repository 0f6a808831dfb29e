"""Products of a step: their FLOPs are those of the formula, and each can be made again by itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stack.bench.calls import BACKWARD_UNITS, CallRecorder, _with_numbers, repeat
from stack.bench.measured import CallCount
from stack.bench.summary import Rates, executed, needed
from stack.config.compose import compose_config
from stack.models.build import build_model
from stack.models.flops import forward_flops
from stack.models.spec import body, head

SEQ = 48
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recorded():
    """A plain micro model, forward and backward on one row."""
    built = build_model(compose_config(["model=micro"], strict=False).model, SEQ, torch.float32, 1)
    recorder = CallRecorder()
    with recorder:
        hidden = body(built.model)(input_ids=torch.arange(SEQ)[None], use_cache=False).last_hidden_state
        head(built.model)(hidden).sum().backward()
    return built.spec, recorder.calls


def test_a_plain_step_makes_what_training_needs(recorded) -> None:
    spec, calls = recorded
    forward = forward_flops(spec, [SEQ])
    counts = [CallCount(call.describe(), call.kind, call.flops, number) for call, number in calls.items()]
    assert executed(counts) == pytest.approx(needed(forward, ranks=1))
    assert executed(counts).gemm == 3 * (forward.total - forward.attention)
    assert executed(counts).attention_forward == forward.attention
    backward = sum(one.flops * one.number for one in counts if one.kind == "attention_backward")
    assert backward == BACKWARD_UNITS * forward.attention


def test_calls_are_told_apart_by_kind(recorded) -> None:
    spec, calls = recorded
    number = dict.fromkeys(("gemm", "attention_forward", "attention_backward"), 0)
    for call, times in calls.items():
        number[call.kind] += times
    # 7 products a layer and the head, once in forward and twice in backward.
    assert number == {
        "gemm": 3 * (7 * spec.num_layers + 1),
        "attention_forward": spec.num_layers,
        "attention_backward": spec.num_layers,
    }


def test_every_call_can_be_repeated(recorded) -> None:
    for call in recorded[1]:
        assert 0 < repeat(call, CPU) < math.inf


def test_strides_and_whole_numbers_are_kept() -> None:
    query = torch.randn(1, 4, 8, 16).transpose(1, 2)
    key = torch.randn(1, 1, 4, 16).expand(1, 8, 4, 16)
    with CallRecorder() as recorder:
        F.scaled_dot_product_attention(query, key, key, is_causal=True)
        torch.addmm(torch.zeros(5), torch.ones(3, 2), torch.ones(5, 2).t())
        F.linear(torch.ones(3, 2), torch.ones(5, 2), torch.zeros(5))
    attention, product = recorder.calls
    assert recorder.calls[product] == 2  # the same operator on the same shapes
    assert product.flops == 2 * 3 * 2 * 5
    assert attention.flops == 4 * 8 * 16 * 4 * 4 / 2
    made = _with_numbers(attention, CPU)
    assert [part.stride() for part in made[:3]] == [query.stride(), key.stride(), key.stride()]
    assert "_scaled_dot_product_flash_attention_for_cpu(1x8x4x16" in attention.describe()


def test_backward_is_repeated_on_ordinary_numbers() -> None:
    """Its log-sum-exp is made up: gradients must come out finite, as in a step."""
    parts = [torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3)]
    with CallRecorder() as recorder:
        F.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()  # type: ignore[arg-type]
    (call,) = [call for call in recorder.calls if call.kind == "attention_backward"]
    args = _with_numbers(call, CPU)
    names = [argument.name for argument in call.func._schema.arguments]
    assert args[names.index("logsumexp")].unique().tolist() == pytest.approx([math.log(64)])
    found = call.func(*args[:8], attn_mask=args[8], scale=args[9])
    assert all(part.isfinite().all() for part in found)


def test_seconds_of_work_at_the_rates() -> None:
    spec_forward = forward_flops(build_spec(), [8])
    rates = Rates(gemm_flops_per_s=1e6, attention_forward_s=0.5, attention_backward_s=1.25)
    layer_flops = spec_forward.attention / 2  # two layers
    gemm = 3 * (spec_forward.total - spec_forward.attention)
    assert needed(spec_forward, ranks=1).seconds(rates, layer_flops) == pytest.approx(
        gemm / 1e6 + 2 * (0.5 + 1.25)
    )


def build_spec():
    built = build_model(compose_config(["model=micro"], strict=False).model, 8, torch.float32, 1)
    assert isinstance(built.model, nn.Module)
    return built.spec
