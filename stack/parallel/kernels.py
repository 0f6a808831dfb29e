"""Which attention kernel the lean layer uses.

It wants one that hands out the log-sum-exp. On a GPU torch has FlashAttention 2 built in, and puts the kernels of the
package flash_attn_interface, FlashAttention 3, in its place when asked to; so `flash_attention_2` and
`flash_attention_3` run through torch's operators, and only other kernels run forward again in backward.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from stack.config.model_checks import KEEPS_SCORES
from stack.ops.attention_kernel import AttentionKernel, CpuFlash, CudaFlash, Recompute
from stack.parallel.ulysses import How, attend

FLASH_DEVICE = "cuda"
"""Type of the devices on which torch has its flash operators."""

PUT_IN = {"flash_attention_3": "FA3"}
"""Backend -> torch's name of what replaces its own FlashAttention 2."""


def make_kernel(backend: str, cu_seqlens: Tensor, query: Tensor, how: How) -> AttentionKernel:
    """A kernel that runs forward once where there is one, else `Recompute` around the backend by name.

    cu_seqlens: boundaries of the whole rows, on the CPU. query: for its device, type and head size.
    """
    bounds = cu_seqlens.tolist()
    longest = max(end - begin for begin, end in zip(bounds[:-1], bounds[1:], strict=True))
    window = how.window if how.window is not None and how.window < longest else None
    plain = not how.extras and not how.dropout
    if query.device.type == FLASH_DEVICE:
        if plain and flash_obstacle(backend, query.device, query.dtype, query.shape[-1]) is None:
            _activate(PUT_IN.get(backend))
            return CudaFlash(cu_seqlens.to(query.device, torch.int32), longest, how.scale, window)
    elif backend == "sdpa" and query.device.type == "cpu" and window is None and plain:
        return CpuFlash(bounds, how.scale)
    return Recompute(partial(attend, backend, cu_seqlens=cu_seqlens, how=how))


def attention_remarks(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """For the start-up summary: a kernel that lean layers run in place of the one named, or why forward runs twice.

    Ranks of a group may differ in this without harm, each keeps what it needs itself.
    """
    if device.type != FLASH_DEVICE:
        return []
    obstacle = flash_obstacle(backend, device, dtype, head_dim)
    if obstacle is not None:
        return [f"lean layers run attention's forward again in backward, a third more of it: {obstacle}"]
    if backend == "flash_attention_2":
        return ["lean layers run flash_attention_2 through torch's own FlashAttention 2"]
    return []


@lru_cache
def flash_obstacle(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's flash operators cannot stand for `backend` on this device, or None.

    They are called by their internal names, whose meaning may change with torch; so the first use is a comparison with
    the backend itself, and an unknown outcome means the slower, public way.
    """
    if backend not in KEEPS_SCORES:
        return f"torch has no operators of {backend} that hand out the log-sum-exp"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"torch's flash operators take 16-bit numbers, not {dtype}"
    try:
        _activate(PUT_IN.get(backend))
        equal = all(_gives_the_same(backend, device, dtype, head_dim, window) for window in (None, 37))
    # Not on this card, not in this build, not installed.
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        _activate(None)
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"torch's operators of {backend} do not run here ({reason})"
    if not equal:
        _activate(None)
        return f"torch's operators do not give the numbers of {backend}"
    return None


def _activate(name: str | None) -> None:
    """Have torch's flash operators be these, for the whole process. Raises what torch or the package raises."""
    if current_flash_attention_impl() == name:
        return
    if name is None:
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(name)


def _gives_the_same(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None
) -> bool:
    """Outputs and gradients of two rows with documents, heads in two calls as a lean layer makes them."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(2, heads, 160, head_dim) for heads in (4, 2, 2, 4)]
    query, key, value, grad = (torch.randn(s, dtype=dtype, device=device, generator=generator) for s in sizes)
    cu_seqlens = torch.tensor([0, 60, 160, 320], dtype=torch.int32)
    how = How(head_dim**-0.5, window, 0.0, {})
    reference = Recompute(partial(attend, backend, cu_seqlens=cu_seqlens, how=how))
    results = []
    for kernel in (reference, CudaFlash(cu_seqlens.to(device), 160, how.scale, window)):
        out, lse = kernel.forward(query, key, value)
        results.append([out, *kernel.backward(grad, query, key, value, out, lse)])
    return all(torch.allclose(mine, true, rtol=2e-2, atol=2e-2) for true, mine in zip(*results, strict=True))
