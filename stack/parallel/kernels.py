"""Which attention kernel the lean layer uses."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from stack.ops.attention_kernel import AttentionKernel, CpuFlash, CudaFlash, Recompute
from stack.parallel.ulysses import How, attend


def make_kernel(backend: str, cu_seqlens: Tensor, query: Tensor, how: How) -> AttentionKernel:
    """A kernel that runs forward once where there is one, else `Recompute` around the backend by name.

    cu_seqlens: boundaries of the whole rows, on the CPU. query: for its device, type and head size.
    """
    bounds = cu_seqlens.tolist()
    longest = max(end - begin for begin, end in zip(bounds[:-1], bounds[1:], strict=True))
    window = how.window if how.window is not None and how.window < longest else None
    if backend == "sdpa" and query.device.type == "cpu" and window is None:
        return CpuFlash(bounds, how.scale)
    if backend == "sdpa" and query.device.type == "cuda" and cuda_flash_works(query.dtype, query.shape[-1]):
        return CudaFlash(cu_seqlens.to(query.device, torch.int32), longest, how.scale, window)
    return Recompute(partial(attend, backend, cu_seqlens=cu_seqlens, how=how))


@lru_cache
def cuda_flash_works(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash operators give on this device what sdpa gives, forward and backward.

    They are called by their internal names, whose meaning may change with torch; so the first use is a comparison, and
    an unknown outcome means the slower, public way.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(1, heads, 160, head_dim) for heads in (4, 2, 2, 4)]
    query, key, value, grad = (torch.randn(s, dtype=dtype, device="cuda", generator=generator) for s in sizes)
    cu_seqlens, how = torch.tensor([0, 60, 160], dtype=torch.int32), How(head_dim**-0.5, None, 0.0, {})
    reference = Recompute(partial(attend, "sdpa", cu_seqlens=cu_seqlens, how=how))
    results = []
    try:
        for kernel in (reference, CudaFlash(cu_seqlens.cuda(), 100, how.scale, None)):
            out, lse = kernel.forward(query, key, value)
            results.append([out, *kernel.backward(grad, query, key, value, out, lse)])
    except RuntimeError:  # this card or build has no flash operator: the public way serves
        return False
    return all(torch.allclose(mine, true, rtol=2e-2, atol=2e-2) for true, mine in zip(*results, strict=True))
