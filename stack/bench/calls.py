"""Matrix products and attention calls of a step: which, how often, how many FLOPs, and how long each takes by itself.

A step cannot be faster than the sum of these, so step time over that sum says how much everything else costs. Each
different call (operator, shapes, strides) is repeated by itself on random numbers, on all ranks at once as in the step.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

GEMMS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
ATTENTION = ("scaled_dot_product", "flash_attention", "flash_attn", "efficient_attention")
SHORT_S = 0.02
"""Calls below this are repeated until they have taken as long, so that the clock and the first touch do not show."""

NUMBERS = "stack_numbers"
"""Attribute of a fake tensor: the numbers that it would have, as a tuple, where somebody said them."""

BACKWARD_UNITS = 2.5
"""FLOPs of attention's backward in those of its forward: five products, one of them the scores again, for two."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument, without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One kind of call. `values`: the arguments in the order of the operator's schema, tensors as Operands; whole-number
    tensors (document boundaries) keep their numbers, as a tuple behind their Operand."""

    func: Any
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.func._schema.name.split("::")[1]

    @property
    def kind(self) -> str:
        """`gemm`, `attention_forward` or `attention_backward`."""
        if self.name.rstrip("_") in GEMMS:
            return "gemm"
        return "attention_backward" if "backward" in self.name else "attention_forward"

    def value(self, *names: str) -> Any:
        """The argument that has one of these names in the operator's schema, or None."""
        for argument, value in zip(self.func._schema.arguments, self.values, strict=True):
            if argument.name in names:
                return value
        return None

    @property
    def flops(self) -> float:
        """Of one such call; causal attention counts the half of the square that is needed."""
        if self.kind == "gemm":
            left = self.value("mat1", "batch1") or self.value("self")
            return 2.0 * math.prod(left.shape) * self.value("mat2", "batch2").shape[-1]
        return attention_flops(self) * (BACKWARD_UNITS if self.kind == "attention_backward" else 1.0)

    def describe(self) -> str:
        shapes = ["x".join(map(str, value.shape)) for value in self.values if isinstance(value, Operand)]
        return f"{self.name}({', '.join(shapes)})"


def attention_flops(call: Call) -> float:
    """Of the forward that belongs to an attention call."""
    query, key = (_operand(call.value(*names)) for names in (("query", "q"), ("key", "k")))
    if query is None or key is None:
        return 0.0
    causal = 0.5 if call.value("is_causal", "causal") else 1.0
    bounds = call.value("cum_seq_q", "cu_seqlens_q")
    if "scaled_dot_product" in call.name:
        rows, heads, length, dim = query.shape
        pairs = rows * length * key.shape[2]
    elif isinstance(bounds, tuple):
        heads, dim = query.shape[-2:]
        pairs = sum((end - begin) ** 2 for begin, end in pairwise(bounds[1]))
    else:
        rows, length, heads, dim = query.shape
        pairs = rows * length * key.shape[1]
    return 4.0 * heads * dim * pairs * causal


def _operand(value: Any) -> Operand | None:
    return value if isinstance(value, Operand) else None


class CallRecorder(TorchDispatchMode):
    """Counts the matrix products and attention calls inside the `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_product(func):
            self.calls[_describe(func, args, kwargs)] += 1
        return func(*args, **kwargs)


def is_product(func: Any) -> bool:
    """Whether it is a matrix product or an attention call."""
    name = func._schema.name.split("::")[1]
    return name.rstrip("_") in GEMMS or any(part in name for part in ATTENTION)


def count_flops(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str, float] | None:
    """(kind, FLOPs) of one call, whose tensors may be fake; None for what is no product."""
    if not is_product(func):
        return None
    with unset_fake_temporarily():  # document boundaries have numbers
        call = _describe(func, args, kwargs)
    return call.kind, call.flops


def _describe(func: Any, args: Any, kwargs: dict[str, Any]) -> Call:
    values = []
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        values.append(_without_numbers(given))
    return Call(func, tuple(values))


def _without_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_without_numbers(item) for item in value)
    if not isinstance(value, Tensor):
        return value
    operand = Operand(tuple(value.shape), value.stride(), value.dtype)
    if value.is_floating_point():
        return operand
    if isinstance(value, FakeTensor):
        numbers = getattr(value, NUMBERS, None)
        return operand if numbers is None else (operand, numbers)
    return operand, tuple(value.flatten().tolist())


def _with_numbers(call: Call, device: torch.device) -> list[Any]:
    """Arguments of a repetition."""
    made = []
    keys = _operand(call.value("key", "k"))
    for argument, value in zip(call.func._schema.arguments, call.values, strict=True):
        if isinstance(value, Operand):
            size = 1 + sum(
                (length - 1) * step for length, step in zip(value.shape, value.stride, strict=True)
            )
            base = torch.randn(max(size, 1), device=device).to(value.dtype)
            if "logsumexp" in argument.name or "lse" in argument.name:
                # As large as that of equal scores, so that backward meets ordinary numbers.
                base.fill_(math.log(max(keys.shape[-2:])) if keys is not None else 0.0)
            made.append(base.as_strided(value.shape, value.stride))
        elif isinstance(value, tuple) and value and isinstance(value[0], Operand):
            made.append(torch.tensor(value[1], dtype=value[0].dtype, device=device).view(value[0].shape))
        else:
            made.append(value)
    return made


def repeat(call: Call, device: torch.device) -> float:
    """Seconds of one such call, without gradients recorded."""
    values, schema = _with_numbers(call, device), call.func._schema.arguments
    args = [value for value, argument in zip(values, schema, strict=True) if not argument.kwarg_only]
    kwargs = {arg.name: value for value, arg in zip(values, schema, strict=True) if arg.kwarg_only}
    with torch.no_grad():
        return clock(lambda: call.func(*args, **kwargs), device)


def clock(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `action` takes; a short one is run once for nothing and then several times."""
    seconds = time_runs(action, 1, device)
    if seconds >= SHORT_S:
        return seconds
    times = max(1, min(100, math.ceil(SHORT_S / max(seconds, 1e-7))))
    return time_runs(action, times, device) / times


def clock_products(tokens: int, hidden: int, wide: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOPs a second of the three matrix products of a weight [wide, hidden]: forward, and its two of backward."""
    narrow, broad, weight = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((tokens, hidden), (tokens, wide), (wide, hidden))
    )
    seconds = clock(lambda: (narrow @ weight.t(), broad @ weight, broad.t() @ narrow), device)
    return 6.0 * tokens * hidden * wide / seconds


def clock_attention(
    rows: int, heads: int, kv_heads: int, seq: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Seconds of causal attention over whole rows, forward and backward."""
    query, grad = (torch.randn(rows, heads, seq, dim, device=device).to(dtype) for _ in range(2))
    key, value = (torch.randn(rows, kv_heads, seq, dim, device=device).to(dtype) for _ in range(2))
    inputs = [part.requires_grad_() for part in (query, key, value)]

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)

    with torch.no_grad():
        forward_s = clock(attend, device)
    out = attend()
    return forward_s, clock(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), device)


def time_runs(action: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds of so many runs of `action`."""
    settle(device)
    start = time.perf_counter()
    for _ in range(times):
        action()
    settle(device)
    return time.perf_counter() - start


def settle(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
