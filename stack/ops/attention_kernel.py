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
    """torch's CPU flash attention through its own operators; sdpa on the CPU calls the same, so results are equal."""

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
        for row, part, heads, kv in self._pieces(query, key):
            k, v = (_spread(whole[row, kv, part], heads) for whole in (key, value))
            # The operator wants the log-sum-exp in the layout in which its forward returns it: heads innermost.
            scores = lse[row, heads, part].transpose(1, 2).contiguous().transpose(1, 2)
            q, of_out, its_out = (whole[row, heads, part].contiguous() for whole in (query, grad, out))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                of_out, q, k, v, its_out, scores, 0.0, True, scale=self.scale
            )
            grads[0][row, heads, part] = found[0]
            grads[1][row, kv, part] = found[1].sum(dim=1, keepdim=True)
            grads[2][row, kv, part] = found[2].sum(dim=1, keepdim=True)
        return grads

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


def _spread(part: Tensor, heads: slice) -> Tensor:
    """One key/value head seen by all query heads of its group. It is copied once so that its positions lie side by side:
    read for every block of queries, among the other heads it would not stay in the cache (4 % of the time at 16,384)."""
    return part.contiguous().expand(-1, heads.stop - heads.start, -1, -1)


class CudaFlash:
    """torch's own FlashAttention 2 in its variable-length form; all rows are one, documents are its sequences."""

    def __init__(self, bounds: Tensor, longest: int, scale: float, window: int | None):
        self.bounds, self.longest, self.scale = bounds, longest, scale
        # The kernel counts the tokens to the left; ours counts the token itself too. None is no window.
        self.left = None if window is None else window - 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        out, lse, self.rng, self.unused, _ = torch.ops.aten._flash_attention_forward(
            *(_joined(part) for part in (query, key, value)),
            *(self.bounds, self.bounds, self.longest, self.longest),
            *(0.0, True, False),
            scale=self.scale,
            window_size_left=self.left,
            window_size_right=None if self.left is None else 0,
        )
        return _parted(out, query), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the random state is not read; the operator wants tensors there all the same.
        nothing = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = torch.ops.aten._flash_attention_backward(
            *(_joined(part) for part in (grad, query, key, value, out)),
            lse,
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
