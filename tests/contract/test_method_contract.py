"""What every method must keep: a sum over targets, scaled before the loss, the same for any split of a
batch."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stack.config.schema import MethodConfig
from stack.data.batch import IGNORE, MicroBatch
from stack.methods import METHODS, build_method

VOCAB = 8


class Body(nn.Module):
    """Looks each token up, and notes what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 4)
        self.calls: list[dict] = []

    def forward(self, input_ids: Tensor, **arguments: object) -> SimpleNamespace:
        self.calls.append(arguments)
        return SimpleNamespace(last_hidden_state=self.table(input_ids))


class Head(nn.Linear):
    """A head with the signature that `parallel/tiling.py` gives it, in its plainest form."""

    def forward(
        self,
        input: Tensor,
        labels: Tensor | None = None,
        scale: float = 1.0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        assert labels is not None
        logits = super().forward(input).flatten(0, 1)
        loss = F.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing
        )
        return scale * (loss + z_loss * (logits.logsumexp(-1) ** 2)[labels.flatten() != IGNORE].sum())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.lm_head = Body(), Head(4, VOCAB, bias=False)

    def get_decoder(self) -> nn.Module:
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def batch_of(labels: list[list[int]]) -> MicroBatch:
    target = torch.tensor(labels)
    rows, seq = target.shape
    return MicroBatch(
        input_ids=torch.arange(rows * seq).reshape(rows, seq) % VOCAB,
        labels=target,
        position_ids=torch.arange(seq).repeat(rows, 1),
        cu_seqlens=torch.arange(0, rows * seq + 1, seq, dtype=torch.int32),
    )


TENSORS = ("input_ids", "labels", "position_ids")
BATCH = batch_of([[1, 2, IGNORE, IGNORE], [3, 4, 5, IGNORE]])


@pytest.fixture(params=METHODS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_counts_by_hand(name: str) -> None:
    assert build_method(MethodConfig(name=name)).count_targets(BATCH) == 5  # pyright: ignore[reportArgumentType]


def test_untrained_sum_by_hand(name: str) -> None:
    """Logits of zero: each target costs ln(8)."""
    model = Model()
    nn.init.zeros_(model.lm_head.weight)
    loss = build_method(MethodConfig(name=name)).loss(model, BATCH, scale=0.5)  # pyright: ignore[reportArgumentType]
    assert loss.item() == pytest.approx(0.5 * 5 * math.log(VOCAB), rel=1e-6)


def test_same_sum_and_gradient_for_any_split(name: str) -> None:
    method = build_method(MethodConfig(name=name))  # pyright: ignore[reportArgumentType]
    whole, parts = Model(), Model()
    total = method.loss(whole, BATCH, scale=0.2)
    total.backward()
    pieces = [
        *[
            replace(BATCH, **{key: getattr(BATCH, key)[:1, part] for key in TENSORS})
            for part in (slice(0, 3), slice(3, 4))
        ],
        replace(BATCH, **{key: getattr(BATCH, key)[1:] for key in TENSORS}),
    ]
    assert sum(method.count_targets(piece) for piece in pieces) == method.count_targets(BATCH)
    losses = [method.loss(parts, piece, scale=0.2) for piece in pieces]
    for loss in losses:
        loss.backward()
    assert sum(loss.item() for loss in losses) == pytest.approx(total.item(), rel=1e-6)
    for mine, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_no_target_is_zero_with_a_gradient(name: str) -> None:
    model = Model()
    empty = batch_of([[IGNORE] * 4])
    method = build_method(MethodConfig(name=name))  # pyright: ignore[reportArgumentType]
    assert method.count_targets(empty) == 0
    loss = method.loss(model, empty, scale=1.0)
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_documents_reach_attention_by_their_boundaries(name: str) -> None:
    model = Model()
    build_method(MethodConfig(name=name)).loss(model, BATCH, scale=1.0)  # pyright: ignore[reportArgumentType]
    for call in model.model.calls:
        assert call["attention_mask"] is None and call["use_cache"] is False
        assert call["cu_seq_lens_q"] is BATCH.cu_seqlens and call["cu_seq_lens_k"] is BATCH.cu_seqlens
        assert call["position_ids"] is BATCH.position_ids


def test_smoothing_and_z_loss_reach_the_head(name: str) -> None:
    model = Model()
    plain, smooth, squared = (
        build_method(MethodConfig(name=name, **settings)).loss(model, BATCH, scale=1.0).item()  # pyright: ignore[reportArgumentType]
        for settings in ({}, {"label_smoothing": 0.3}, {"z_loss": 0.1})
    )
    assert len({round(value, 4) for value in (plain, smooth, squared)}) == 3
