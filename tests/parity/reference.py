"""The judge: one process, plain PyTorch and transformers, one document at a time, in float64.

It shares no code with what it judges: no packing, no tiling, no engine, no loss of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

SEQ, ROWS, VOCAB = 15, 6, 64
LRS = [0.1] * 5 + [1024.0]
"""Learning rate of each SGD step. The last is so large that the update shows the gradient to fp32's full precision; it is
only read, as the weights behind it are far off."""


@dataclass
class Row:
    """Documents that fill one row, and for each token whether it is to be predicted."""

    documents: list[list[int]]
    wanted: list[list[bool]]


@dataclass
class Curve:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    """Of the last step."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Before the last step."""


def make_steps(text: str) -> list[list[Row]]:
    """Rows of each step. Lengths and targets are uneven on purpose."""
    generator = torch.Generator().manual_seed(11)
    steps = []
    for step in range(len(LRS)):
        rows = []
        for row in range(ROWS):
            lengths = [SEQ] if text != "packed" else _lengths(generator)
            documents = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
            wanted = [[True] * n for n in lengths]
            if text == "rank without target":
                # The first half of each row, and two rows in every step but one, have nothing to predict.
                wanted = [[place > 8 and not (step and row in (1, 4)) for place in range(SEQ)]]
            rows.append(Row(documents, wanted))
        steps.append(rows)
    return steps


def _lengths(generator: torch.Generator) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < SEQ:
        length = int(torch.randint(1, 10, (1,), generator=generator))
        lengths.append(min(length, SEQ - sum(lengths)))
    return lengths


def load(folder: str) -> nn.Module:
    """Every part in its plainest implementation, which also is the only one that takes float64."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return model.train()


def train(model: nn.Module, steps: list[list[Row]], lrs: list[float]) -> Curve:
    """SGD on the mean over all wanted tokens of a step. Frozen parameters are left alone."""
    curve = Curve()
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for lr, rows in zip(lrs, steps, strict=True):
        losses, targets = [], 0
        for row in rows:
            for document, wanted in zip(row.documents, row.wanted, strict=True):
                if len(document) < 2 or not any(wanted[1:]):
                    continue
                ids = torch.tensor([document])
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
                losses_here = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
                kept = torch.tensor(wanted[1:])
                losses.append(losses_here[kept].sum())
                targets += int(kept.sum())
        loss = torch.stack(losses).sum() / targets
        model.zero_grad()
        loss.backward()
        curve.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        curve.grads = {name: param.grad.clone() for name, param in trainable.items()}
        with torch.no_grad():
            for name, param in trainable.items():
                param -= lr * curve.grads[name]
        curve.losses.append(loss.item())
        curve.norms.append(torch.stack([grad.norm() for grad in curve.grads.values()]).norm().item())
    return curve
