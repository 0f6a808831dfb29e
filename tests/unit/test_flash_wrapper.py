"""transformers' own wrapper around the flash kernels, with a kernel of plain torch in place of theirs: what reaches the
kernel is one variable-length row with our boundaries, scale and window, and what comes back is each row's attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as wrapper
from torch import Tensor, nn

from stack.ops.reference import document_attention
from stack.parallel.ulysses import AttentionSettings, install_attention, ulysses_attention

BOUNDS = torch.tensor([0, 65, 300, 301, 428, 600], dtype=torch.int32)
ROWS, SEQ = 2, 300


class Kernel:
    """`flash_attn_varlen_func` of flash-attn 2, by the definition."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        """q, k and v: [tokens, heads, head_dim]."""
        self.calls.append(
            {"q": q, "bounds": (cu_seqlens_q, cu_seqlens_k), "longest": (max_seqlen_q, max_seqlen_k)}
        )
        assert causal and softmax_scale is not None and softcap == 0.0 and dropout_p == 0.0
        heads_first = [part.transpose(0, 1)[None] for part in (q, k, v)]
        # A kernel's window counts the tokens on the left, without the token itself.
        window = None if window_size == (-1, -1) else window_size[0] + 1
        return document_attention(*heads_first, cu_seqlens_q, softmax_scale, window)[0].transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    loaded = (None, found, None, None, None)  # of the five functions only the variable-length one may be used
    monkeypatch.setattr(wrapper, "_lazy_imports", lambda *args, **kwargs: loaded)
    monkeypatch.setattr(wrapper, "_loaded_implementation", None)
    return found


@pytest.mark.parametrize("backend", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("window", [None, 1, 37, 1000])
def test_packed_rows_go_through_the_wrapper_exactly(kernel: Kernel, backend: str, window: int | None) -> None:
    torch.manual_seed(0)
    sizes = [(ROWS, heads, SEQ, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(size).bfloat16().requires_grad_() for size in sizes]
    module = nn.Module()
    install_attention([module], SimpleNamespace(), AttentionSettings(backend, 1, 0, None))
    out, _ = ulysses_attention(
        module, *inputs, None, scaling=0.3, sliding_window=window, cu_seq_lens_q=BOUNDS, softcap=None
    )
    want = document_attention(*inputs, BOUNDS, 0.3, window).transpose(1, 2)
    assert torch.equal(out, want)
    grads, wanted = (torch.autograd.grad(each.float().square().sum(), inputs) for each in (out, want))
    assert all(torch.equal(mine, true) for mine, true in zip(grads, wanted, strict=True))
    (call,) = kernel.calls
    assert call["q"].shape == (ROWS * SEQ, 4, 8) and call["longest"] == (235, 235)
    assert all(torch.equal(bounds, BOUNDS) for bounds in call["bounds"])
