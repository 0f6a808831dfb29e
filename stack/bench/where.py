"""Where in the source a tensor was made: the line, and what part of a step its tensors are.

Forward operators run under Python frames that say it. Backward ones of autograd run under none; they are told by the line
that made their node in forward, which its sequence number finds again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import PurePath
from types import CodeType
from typing import NamedTuple

import torch

from stack.plan.forecast import (
    ATTENTION,
    BUCKETS,
    GATHERED,
    GRADIENTS,
    HIDDEN,
    KEPT,
    LOSS,
    MLP,
    NORMS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
)


class _Rule(NamedTuple):
    """file: part of the path; names: parts of the qualified function name, any of which is enough, none for all."""

    file: str
    names: tuple[str, ...]
    category: str


RULES = tuple(
    _Rule(file, names, category)
    for file, names, category in (
        ("stack/ops/tiled_loss.py", (), LOSS),
        ("stack/ops/token_loss.py", (), LOSS),
        ("stack/ops/reference.py", ("token_loss",), LOSS),
        ("stack/ops/host_store.py", (), KEPT),
        ("stack/ops/offload.py", (), KEPT),
        ("stack/ops/attention_kernel.py", (), ATTENTION),
        ("stack/ops/attention.py", (), ATTENTION),
        ("stack/parallel/exchange.py", (), ATTENTION),
        ("stack/parallel/ulysses.py", (), ATTENTION),
        ("stack/dist/collectives.py", (), ATTENTION),
        ("stack/parallel/fused.py", ("norm", "Norm"), NORMS),
        ("stack/ops/param_grads.py", ("totals",), GATHERED),
        ("stack/ops/tiled_mlp.py", (), MLP),
        ("stack/parallel/lean.py", ("_first_half", "_second_half"), MLP),
        ("stack/parallel/lean.py", (), HIDDEN),
        ("stack/engine/handle.py", (), OTHER),
        ("/transformers/", ("Norm.",), NORMS),
        ("/transformers/", ("MLP.", "Experts.", "Moe", "Router", "grouped_mm"), MLP),
        ("/transformers/", ("Attention.", "rotary", "rotate_half", "Rotary"), ATTENTION),
        ("/transformers/", ("Layer.", "Model."), HIDDEN),
        ("zero/stage3.py", ("_create_fp32_partitions", "initialize_optimizer_states"), OPTIMIZER),
        ("zero/stage3.py", ("ipg", "bucket", "reduce", "avg"), BUCKETS),
        ("zero/stage3.py", ("_create_fp16_partitions", "defragment", "_move_to_flat"), PARAMETERS),
        ("zero/stage3.py", ("grad", "_setup_for_real_optimizer"), GRADIENTS),
        ("zero/stage_1_and_2.py", ("ipg", "bucket", "reduc", "average"), BUCKETS),
        ("zero/stage_1_and_2.py", ("grad",), GRADIENTS),
        ("zero/stage_1_and_2.py", (), OPTIMIZER),
        ("zero/partition_parameters.py", (), GATHERED),
        ("zero/partitioned_param_coordinator.py", (), GATHERED),
        ("zero/parameter_offload.py", (), GATHERED),
        ("runtime/comm/", (), BUCKETS),
        ("torch/optim/", (), OPTIMIZER),
        ("deepspeed/runtime/bf16_optimizer.py", (), OPTIMIZER),
        ("deepspeed/runtime/fp16/", (), OPTIMIZER),
    )
)
"""The innermost frame with a rule decides, by the first rule that fits it."""

HIDDEN_FROM_LINES = (
    "/torch/",
    "deepspeed/utils/",
    "deepspeed/comm/",
    "stack/bench/",
    "/jaxtyping/",
    "/beartype/",
    "<",
)
"""Frames that are no place to name. torch's own are how an operator is called, and are left out but for its optimizers."""


@dataclass(frozen=True)
class Site:
    """category: of `stack.plan.forecast.CATEGORIES`. line: `file:line function`, with `backward of` before it."""

    category: str
    line: str


class Sites:
    """Finds the site of the operator that is running. One a count."""

    def __init__(self) -> None:
        self._rules: dict[CodeType, str | None] = {}
        self._named: dict[CodeType, str | None] = {}
        self._forward: dict[int, Site] = {}

    def restart(self) -> None:
        """Forget the nodes of the step before."""
        self._forward.clear()

    def remember(self) -> None:
        """To be called for each operator: in forward its node, which has just been made, is the last one numbered."""
        if torch.is_grad_enabled() and torch._C._current_autograd_node() is None:
            self._forward[torch.autograd._get_sequence_nr() - 1] = self.find()

    def find(self) -> Site:
        category, line = None, None
        frame = sys._getframe(2)
        while frame is not None and (category is None or line is None):
            code = frame.f_code
            if category is None:
                category = self._category(code)
            if line is None and (name := self._name(code)) is not None:
                line = f"{name}:{frame.f_lineno} {code.co_qualname}"
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        made = None if node is None else self._forward.get(node._sequence_nr())
        # A backward written in Python has frames of its own, which say more.
        if made is not None and (line is None or category in (None, OTHER)):
            return Site(made.category, f"backward of {made.line}")
        return Site(category or OTHER, line or "outside of any known file")

    def _category(self, code: CodeType) -> str | None:
        if code not in self._rules:
            self._rules[code] = next(
                (
                    rule.category
                    for rule in RULES
                    if rule.file in code.co_filename
                    and (not rule.names or any(name in code.co_qualname for name in rule.names))
                ),
                None,
            )
        return self._rules[code]

    def _name(self, code: CodeType) -> str | None:
        if code not in self._named:
            path = code.co_filename
            hidden = any(part in path for part in HIDDEN_FROM_LINES) and "torch/optim/" not in path
            self._named[code] = None if hidden else "/".join(PurePath(path).parts[-3:])
        return self._named[code]
