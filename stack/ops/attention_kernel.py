"""Attention in two separate calls, so that what the forward call found need not be found again in backward.

autograd's attention keeps its own state; inside a checkpointed layer it runs forward twice. A kernel here returns its
output and what backward needs besides (the log-sum-exp of each query's scores, 4 bytes a query and head), and the caller
decides where they live. One key/value head with its query heads is worked on at a time, so the working set is that of
one group.

`bounds` are document boundaries as in `ops.attention.sdpa_documents`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Whole-row attention that autograd can differentiate: [rows, heads, seq, head_dim] of q, k and v to one like q."""


class AttentionKernel(Protocol):
    """Forward and backward over whole rows. query [rows, heads, seq, head_dim], key and value with kv_heads heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output like query, and what backward needs besides (fp32 [rows, heads, seq]) or None."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value. grad, out: like query."""
        ...


class CpuFlash:
    """torch's CPU flash attention through its own operators; sdpa on the CPU calls the same, so outputs are equal.

    Backward is computed in `backward_dtype`; in a wider type than the tensors' one query head at a time.
    """

    def __init__(self, bounds: list[int], scale: float):
        self.bounds, self.scale = bounds, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        for row, part, heads, kv in self._pieces(query, key):
            q, k, v = (
                query[row, heads, part],
                _spread(key[row, kv, part], heads),
                _spread(value[row, kv, part], heads),
            )
            out[row, heads, part], found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, True, scale=self.scale
            )
            lse[row, heads, part] = found
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert lse is not None
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        dtype = backward_dtype(query.dtype)
        for row, part, heads, kv in self._pieces(query, key):
            k, v = (_laid_out(whole[row, kv, part], dtype) for whole in (key, value))
            # Wide copies of all heads of a group would be the peak of a step, so they are made of one at a time.
            step = heads.stop - heads.start if dtype == query.dtype else 1
            sums: list[Tensor] = []
            for first in range(heads.start, heads.stop, step):
                some = slice(first, first + step)
                whole = (query, grad, out, lse)
                dq, *found = self._call_backward(k, v, *(one[row, some, part] for one in whole), dtype)
                grads[0][row, some, part] = dq
                del dq
                found = [one.sum(dim=1, keepdim=True) if step > 1 else one for one in found]
                sums = [total.add_(one) for total, one in zip(sums, found, strict=True)] if sums else found
                del found
            grads[1][row, kv, part], grads[2][row, kv, part] = sums
        return grads

    def _call_backward(
        self,
        key: Tensor,
        value: Tensor,
        query: Tensor,
        grad: Tensor,
        out: Tensor,
        lse: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of some query heads of one group, in `dtype`; dk and dv a query head each."""
        key, value = (part.expand(-1, query.shape[1], -1, -1) for part in (key, value))
        # The operator wants the log-sum-exp in the layout in which its forward returns it: heads innermost.
        scores = lse.transpose(1, 2).contiguous().transpose(1, 2)
        query, grad, out = (_laid_out(part, dtype) for part in (query, grad, out))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, scores, 0.0, True, scale=self.scale
        )

    def _pieces(self, query: Tensor, key: Tensor):
        """(row, positions, query heads, key/value head) of each document and group, as slices."""
        seq, group = query.shape[2], query.shape[1] // key.shape[1]
        for begin, end in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            if begin == end:
                continue
            row, start = divmod(begin, seq)
            for kv in range(key.shape[1]):
                heads = slice(kv * group, (kv + 1) * group)
                yield slice(row, row + 1), slice(start, start + end - begin), heads, slice(kv, kv + 1)


def backward_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which torch's CPU flash attention goes backward fastest on tensors of `dtype`.

    Its backward multiplies by oneDNN, and where oneDNN has no instructions for 16-bit products (on x86: AVX512) by plain
    loops: 3.1 s in bf16 in place of 0.43 in fp32 at [1, 4, 4096, 32] with AVX2, and gradients of k and v are 2.5 times as
    far from fp64's. Forward multiplies into fp32 and loses nothing: 0.14 s in place of 0.24.
    """
    asked = _FAST_PRODUCTS.get(dtype)
    return dtype if asked is None or (torch.backends.mkldnn.is_available() and asked()) else torch.float32


_FAST_PRODUCTS: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
"""By what torch's own GEMM asks before it takes oneDNN (aten/src/ATen/native/mkldnn/Matmul.cpp)."""


def _laid_out(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous and of this type, in one copy or none."""
    return part.contiguous() if part.dtype == dtype else part.to(dtype, memory_format=torch.contiguous_format)


def _spread(part: Tensor, heads: slice) -> Tensor:
    """One key/value head seen by all query heads of its group. It is copied once so that its positions lie side by side:
    read for every block of queries, among the other heads it would not stay in the cache (4 % of the time at 16,384)."""
    return part.contiguous().expand(-1, heads.stop - heads.start, -1, -1)


class CudaFlash:
    """torch's flash operators in their variable-length form; all rows are one, documents are its sequences.

    They are FlashAttention 2, built into torch, or what was activated in its place (`parallel/kernels.py`).
    """

    def __init__(self, bounds: Tensor, longest: int, scale: float, window: int | None):
        self.bounds, self.longest, self.scale = bounds, longest, scale
        # The kernel counts the tokens to the left; ours counts the token itself too. None is no window.
        self.left = None if window is None else window - 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(_joined(part) for part in (query, key, value)),
            *(self.bounds, self.bounds, self.longest, self.longest),
            *(0.0, True, False),
            scale=self.scale,
            window_size_left=self.left,
            window_size_right=None if self.left is None else 0,
        )
        rows, heads, seq, _ = query.shape
        return _parted(out, query), lse.view(heads, rows, seq).transpose(0, 1)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert lse is not None
        # Without dropout the random state is not read; the operator wants tensors there all the same.
        nothing = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = torch.ops.aten._flash_attention_backward(
            *(_joined(part) for part in (grad, query, key, value, out)),
            lse.transpose(0, 1).reshape(query.shape[1], -1),
            *(self.bounds, self.bounds, self.longest, self.longest),
            *(0.0, True, nothing, nothing),
            scale=self.scale,
            window_size_left=self.left,
            window_size_right=None if self.left is None else 0,
        )
        return _parted(grads[0], query), _parted(grads[1], key), _parted(grads[2], value)


def _joined(part: Tensor) -> Tensor:
    """[rows, heads, seq, dim] -> [rows * seq, heads, dim]."""
    return part.transpose(1, 2).reshape(-1, part.shape[1], part.shape[3])


def _parted(joined: Tensor, like: Tensor) -> Tensor:
    rows, heads, seq, dim = like.shape
    return joined.view(rows, seq, heads, dim).transpose(1, 2)


class Recompute:
    """Any attention function: backward runs its forward once more. The slow twin of the others, and the fall-back."""

    def __init__(self, attend: Attend):
        self.attend = attend

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            return self.attend(query, key, value), None

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            inputs = [part.detach().requires_grad_() for part in (query, key, value)]
            return torch.autograd.grad(self.attend(*inputs), inputs, grad)  # type: ignore[return-value]  # three inputs
