"""What attention and norms call where the device is virtual: the operators of a real one, by name.

torch and this stack choose kernels by the type of the device, which here has none. `cpu` takes those of CPU ranks, to be
compared with; `gpu` takes FlashAttention 2 and the fused norm, as on a card.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from stack.bench.calls import NUMBERS

Kernels = Literal["cpu", "gpu"]


def install_kernels(kernels: Kernels) -> None:
    """For the whole process."""
    import stack.ops.attention as attention
    import stack.parallel.fused as fused
    import stack.parallel.lean as lean

    lean.make_kernel = _kernel_maker(kernels)
    sdpa = _flash_sdpa if kernels == "gpu" else _cpu_sdpa
    attention.F = SimpleNamespace(scaled_dot_product_attention=sdpa)
    if kernels == "gpu":
        fused._MAKERS["torch"] = lambda: (_norm, None, None)
    tried_out = fused._plain_eps

    def plain_eps(norm: torch.nn.Module) -> float | None:
        with unset_fake_temporarily():  # it compares numbers
            return tried_out(norm)

    fused._plain_eps = plain_eps


def _kernel_maker(kernels: Kernels) -> Any:
    from stack.ops.attention_kernel import CpuFlash, CudaFlash, Recompute
    from stack.parallel.ulysses import attend

    def make_kernel(backend: str, cu_seqlens: Tensor, query: Tensor, how: Any) -> Any:
        bounds = cu_seqlens.tolist()
        longest = max(end - begin for begin, end in zip(bounds[:-1], bounds[1:], strict=True))
        window = how.window if how.window is not None and how.window < longest else None
        if kernels == "gpu":
            on_device = cu_seqlens.to(query.device)
            setattr(on_device, NUMBERS, tuple(bounds))
            return CudaFlash(on_device, longest, how.scale, window)
        if window is None:
            return CpuFlash(bounds, how.scale)
        return Recompute(lambda *qkv: attend(backend, *qkv, cu_seqlens=cu_seqlens, how=how))

    return make_kernel


def _flash_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What sdpa calls on a card in bf16 or fp16; a window's mask is not read, as masked kernels keep the same tensors."""
    return torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )[0]


def _cpu_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


class _FusedNorm(torch.autograd.Function):
    """`torch.nn.functional.rms_norm` on a card: it keeps its input and one number a row, in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


def _norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _FusedNorm.apply(hidden, weight)
