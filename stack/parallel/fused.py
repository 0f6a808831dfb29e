"""Fused kernels for the small parts of a block, put in as instances: RMSNorm, rotary embedding and SwiGLU.

transformers computes RMSNorm with five operators and a copy of its input in fp32. `torch.nn.functional.rms_norm` is one
kernel on a GPU; on the CPU torch takes the same five operators, so nothing is won there (forward and backward at
[1, 2048, 4096] in bf16: 201 ms of CPU time in place of 162; at [1, 2048, 256] both 1.5 ms).

In fp32 the fused norm gives the same bits on the CPU. In bf16 it rounds once, at the end, where transformers rounds
before and after the multiplication by the weight: a quarter of the values differ by one rounding, and the largest error
against fp64 halves (2.6e-3 in place of 5.3e-3 of the largest value).

`compiled` fuses the operators of all three parts by torch.compile; a norm then takes 0.3 ms of CPU time in place of 1.5,
for compilations of about 10 s each at the first step.

A part is exchanged only where it computes what the kernel computes. That is tried out on its own forward with small
random weights, not read from its name, so Gemma's norm, which multiplies by 1 + weight, keeps its own.
torch has no fused rotary embedding and no fused SwiGLU: with `torch` they stay the model's own.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stack.errors import ModelError

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""(hidden [..., size], weight [size], eps) -> like hidden."""

Rotary = Callable[..., tuple[Tensor, Tensor]]
"""(query [rows, heads, seq, dim], key, cos [rows, seq, dim], sin) -> both turned."""

Swiglu = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) -> silu(gate) * up."""

ROTARY = "apply_rotary_pos_emb"
"""The function by which transformers' attention modules turn q and k; a global of the file that they stand in."""


def install_fused(
    norms: Iterable[nn.Module],
    mlps: Iterable[nn.Module],
    attentions: Iterable[nn.Module],
    kernels: str,
    device: torch.device,
) -> list[str]:
    """Change the forward of each instance that fits. kernels: see `MemoryConfig.fused_kernels`.

    Returns a remark for each kind of norm that keeps its own forward. Raises ModelError if Liger is not installed.
    """
    if kernels == "auto":
        kernels = "torch" if device.type == "cuda" else "none"
    if kernels == "none":
        return []
    norm, rotary, swiglu = _MAKERS[kernels]()
    left = {}
    for module in norms:
        eps = _plain_eps(module)
        if eps is None:
            left[type(module).__name__] = None
        else:
            module.forward = _norm_forward(module, norm, eps)
    if swiglu is not None:
        for mlp in filter(_is_swiglu, mlps):
            mlp.forward = _swiglu_forward(mlp, swiglu)
    if rotary is not None:
        for attention in filter(_turns_halves, attentions):
            _use_rotary(attention, rotary)
    return [f"{name} keeps its own forward: it is no plain RMSNorm" for name in left]


def rms_norms(model: nn.Module) -> list[nn.Module]:
    """Modules that may be an RMSNorm: one vector of weights and nothing else, and not torch's own."""
    return [module for module in model.modules() if _holds_one_vector(module)]


def _holds_one_vector(module: nn.Module) -> bool:
    params = dict(module.named_parameters())
    if list(params) != ["weight"] or type(module).__module__.startswith("torch."):
        return False
    return len(getattr(params["weight"], "ds_shape", params["weight"].shape)) == 1


def _torch_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], weight, eps)


def _compiled() -> tuple[Norm, Rotary, Swiglu]:
    norm = torch.compile(_plain_norm, dynamic=True)
    turn = torch.compile(_plain_turn, dynamic=True)

    def flat_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Always two axes, so that norms of heads and of hidden states share what was compiled.
        return norm(hidden.reshape(-1, hidden.shape[-1]), weight, eps).view(hidden.shape)

    def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return turn(query, cos, sin), turn(key, cos, sin)

    return flat_norm, rotary, torch.compile(_plain_swiglu, dynamic=True)


def _plain_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)


def _plain_turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [rows, heads, seq, dim], cos and sin [rows, seq, dim]: the first half turned against the second."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def _plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _liger() -> tuple[Norm, Rotary, Swiglu]:
    try:
        liger: Any = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError as error:
        raise ModelError(
            f"memory.fused_kernels=liger: cannot import liger_kernel ({error}). Fix: pip install '.[liger]', or "
            "memory.fused_kernels=torch"
        ) from error

    def norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Not in place: the incoming gradient may be another layer's too.
        return liger.liger_rms_norm(hidden, weight, eps, in_place=False)

    return norm, liger.liger_rope, liger.liger_swiglu


_MAKERS: dict[str, Callable[[], tuple[Norm, Rotary | None, Swiglu | None]]] = {
    "torch": lambda: (_torch_norm, None, None),
    "compiled": _compiled,
    "liger": _liger,
}


def _norm_forward(norm: nn.Module, fused: Norm, eps: float) -> Callable[[Tensor], Tensor]:
    # The weight is read at each call: under ZeRO-3 its data come and go.
    return lambda hidden_states: fused(hidden_states, norm.weight, eps)  # type: ignore[arg-type]


def _swiglu_forward(mlp: Any, swiglu: Swiglu) -> Callable[[Tensor], Tensor]:
    return lambda x: mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))


def _use_rotary(attention: nn.Module, rotary: Rotary) -> None:
    """The module's own forward, reading `rotary` where it reads the global function; other modules are untouched."""
    plain = inspect.unwrap(type(attention).forward)
    forward = types.FunctionType(
        plain.__code__,
        plain.__globals__ | {ROTARY: rotary},
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    forward.__kwdefaults__ = plain.__kwdefaults__
    attention.forward = types.MethodType(forward, attention)


def _plain_eps(norm: nn.Module) -> float | None:
    """The eps of a plain RMSNorm; None for anything else."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float):
        return None
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(8, generator=generator), torch.randn(2, 3, 8, generator=generator)
    # Small enough that another eps, or one in another place, would show.
    hidden[0] *= eps**0.5
    twin = copy.copy(norm)
    twin._parameters = {"weight": nn.Parameter(weight)}
    return eps if _agree(type(norm).forward, (twin, hidden), _torch_norm(hidden, weight, eps)) else None


def _is_swiglu(mlp: nn.Module) -> bool:
    """Whether it computes down(silu(gate(x)) * up(x))."""
    names = {name for name, _ in mlp.named_children()}
    if not {"gate_proj", "up_proj", "down_proj"} <= names <= {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    twin, hidden = copy.copy(mlp), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    gate, up, down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
    twin._modules = mlp._modules | {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return _agree(type(mlp).forward, (twin, hidden), down(_plain_swiglu(gate(hidden), up(hidden))))


def _turns_halves(attention: nn.Module) -> bool:
    """Whether its rotary function turns the first half of a head against the second, by the same angles."""
    rotary = inspect.unwrap(type(attention).forward).__globals__.get(ROTARY)
    if rotary is None:
        return False
    generator = torch.Generator().manual_seed(0)
    query, key, angles = (torch.randn(1, n, 3, 8, generator=generator) for n in (2, 1, 1))
    cos, sin = angles[:, 0].cos(), angles[:, 0].sin()
    cos, sin = (torch.cat([part[..., :4]] * 2, dim=-1) for part in (cos, sin))

    return _agree(rotary, (query, key, cos, sin), (_plain_turn(query, cos, sin), _plain_turn(key, cos, sin)))


@torch.no_grad()
def _agree(function: Callable[..., Any], arguments: tuple[Any, ...], want: Any) -> bool:
    try:
        torch.testing.assert_close(function(*arguments), want, rtol=1e-5, atol=1e-6)
    except (AssertionError, AttributeError, TypeError, RuntimeError):  # whatever it computes, it is not this
        return False
    return True
