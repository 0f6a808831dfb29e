"""Attention by document boundaries against the masked definition, with gradients; and the division of heads."""

import pytest
import torch

from stack.ops.attention import sdpa_documents
from stack.ops.reference import document_attention
from stack.parallel.exchange import plan_heads, put_heads, take_heads
from stack.parallel.ulysses import _for_all_ranks

CASES = {
    "one document": (1, 12, [0, 12]),
    "uneven": (1, 12, [0, 1, 4, 5, 12]),
    "two rows": (2, 9, [0, 4, 9, 10, 18]),
    "empty document": (1, 6, [0, 3, 3, 6]),
}


def tensors(rows, seq, heads=4, kv_heads=2, dim=8):
    torch.manual_seed(0)
    shapes = [(rows, heads, seq, dim), (rows, kv_heads, seq, dim), (rows, kv_heads, seq, dim)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("name", CASES)
def test_equals_masked_attention(name, window):
    rows, seq, bounds = CASES[name]
    inputs = tensors(rows, seq)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    got = sdpa_documents(*inputs, cu_seqlens, 0.3, window)
    want = document_attention(*inputs, cu_seqlens, 0.3, window)
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((want * weights).sum(), inputs),
    )


def test_documents_do_not_see_each_other():
    inputs = [tensor.detach() for tensor in tensors(1, 24)]
    cu_seqlens = torch.tensor([0, 10, 24], dtype=torch.int32)
    before = sdpa_documents(*inputs, cu_seqlens, 0.3)
    for tensor in inputs:
        tensor[:, :, 4] += 1.0
    after = sdpa_documents(*inputs, cu_seqlens, 0.3)
    assert torch.equal(before[:, :, 10:], after[:, :, 10:])
    assert not torch.equal(before[:, :, :10], after[:, :, :10])


HEADS = [
    (4, 2, 2),
    (4, 2, 4),
    (8, 8, 4),
    (32, 8, 8),
    (32, 8, 16),
    (32, 8, 32),
    (12, 4, 6),
    (6, 2, 3),
    (9, 3, 3),
    (64, 8, 64),
]
"""Query heads, key/value heads, ranks."""


@pytest.mark.parametrize(("num_q", "num_kv", "sp"), HEADS)
def test_every_rank_gets_the_heads_its_queries_read(num_q, num_kv, sp):
    group = num_q // num_kv
    for rank in range(sp):
        plan = plan_heads(num_q, num_kv, sp, rank)
        assert len(plan.kv_index) == sp * plan.num_kv_local
        received = plan.kv_index[rank * plan.num_kv_local : (rank + 1) * plan.num_kv_local]
        for local in range(plan.num_q_local):
            if plan.q_to_kv is None:
                place = local // (plan.num_q_local // plan.num_kv_local)
            else:
                place = plan.q_to_kv[local]
            assert received[place] == (rank * plan.num_q_local + local) // group


@pytest.mark.parametrize(("num_q", "num_kv", "sp"), HEADS)
def test_heads_go_where_the_plan_says_and_their_gradients_come_back(num_q, num_kv, sp):
    generator = torch.Generator().manual_seed(0)
    plan = plan_heads(num_q, num_kv, sp, 0)
    rows, seq, dim, local, part = 2, 5, 3, plan.num_kv_local, slice(1, 4)
    heads = torch.randn(rows, num_kv, 3, dim, generator=generator)
    sent = torch.zeros(sp, rows, seq, 1 + local, dim)
    put_heads(sent, part, 1, heads, plan)
    picked = _for_all_ranks(heads, plan)
    for place, head in enumerate(plan.kv_index):
        assert torch.equal(sent[place // local, :, part, 1 + place % local], heads[:, head])
        assert torch.equal(picked[:, place], heads[:, head])
    assert not sent[:, :, :, 0].any() and not sent[:, :, 0].any() and not sent[:, :, 4].any()

    back = torch.randn(sent.shape, generator=generator)
    want = torch.zeros(heads.shape)
    for place, head in enumerate(plan.kv_index):
        want[:, head] += back[place // local, :, part, 1 + place % local]
    torch.testing.assert_close(take_heads(back, part, 1, local, num_kv, plan), want)


def test_gradients_of_a_head_that_went_to_several_ranks_are_rounded_once():
    plan = plan_heads(16, 2, 16, 0)
    back = torch.randn(16, 1, 4, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = back.float().view(2, 8, 1, 4, 8).sum(dim=1).transpose(0, 1).bfloat16()
    assert plan.kv_copies == 8 and torch.equal(take_heads(back, slice(None), 0, 1, 2, plan), want)
    heads = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    _for_all_ranks(heads, plan).backward(back.view(1, 16, 4, 8))
    assert heads.grad is not None and torch.equal(heads.grad, want)


def test_key_value_heads_travel_once_where_they_divide():
    assert plan_heads(32, 8, 8, 0).num_kv_local == 1 and plan_heads(32, 8, 8, 0).kv_copies == 1
    assert plan_heads(32, 8, 4, 0).num_kv_local == 2
    assert plan_heads(32, 8, 32, 5).num_kv_local == 1
