"""Which kernel a lean layer takes on a GPU, and what it says where it cannot take torch's flash operators.

The operators run here through stand-ins on the CPU, which torch's dispatcher calls as it would call the ones on a GPU;
they read the log-sum-exp that they are given, so one of another layout gives other gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as wrapper
from torch import Tensor
from torch.library import Library
from torch.nn.attention import _registry, current_flash_attention_impl

import stack.parallel.kernels as kernels
from stack.config.model_checks import KEEPS_SCORES
from stack.config.schema import MemoryConfig
from stack.models import spec
from stack.ops.attention_kernel import CudaFlash, Recompute
from stack.ops.reference import document_attention
from stack.parallel.kernels import attention_remarks, flash_obstacle, make_kernel
from stack.parallel.lean import install_lean
from stack.parallel.ulysses import AttentionSettings, How, install_attention
from tests.unit.plan_rig import planned
from tests.unit.test_flash_wrapper import Kernel
from tests.unit.test_lean import model_of, run

CPU, BF16 = torch.device("cpu"), torch.bfloat16
BOUNDS = torch.tensor([0, 65, 300, 301, 428, 600], dtype=torch.int32)
HOW = How(0.3, None, 0.0, {})


class Operators:
    """torch's two flash operators in their variable-length form, by the definition."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []
        """(direction, the implementation that torch has put in) of each."""
        self.error = 1.0
        self.handles: list[Any] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("forward", current_flash_attention_impl()))
        self._check(bounds, args, kwargs)
        out, lse = torch.zeros_like(q), torch.empty(q.shape[1], q.shape[0])
        for part in _documents(bounds):
            scores, _, wide = self._scores(q[part], k[part], kwargs)
            lse[:, part] = scores.logsumexp(-1)
            out[part] = (scores.softmax(-1) @ _heads(v[part], wide)).transpose(0, 1).to(q.dtype)
        nothing = torch.empty(0)
        return out * self.error, lse, nothing, nothing, nothing

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor,
        *args: Any, **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.calls.append(("backward", current_flash_attention_impl()))
        self._check(bounds, args, kwargs)
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous() and lse.dtype == torch.float32
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part in _documents(bounds):
            scores, queries, group = self._scores(q[part], k[part], kwargs)
            keys, values, of_out, found = (
                _heads(one[part], n) for one, n in ((k, group), (v, group), (grad, 1), (out, 1))
            )
            weights = (scores - lse[:, part, None]).exp()
            of_scores = weights * (of_out @ values.mT - (of_out * found).sum(-1, keepdim=True))
            parts = (
                of_scores @ keys * kwargs["scale"],
                of_scores.mT @ queries * kwargs["scale"],
                weights.mT @ of_out,
            )
            for total, one in zip(grads, parts, strict=True):
                grouped = one.view(total.shape[1], -1, *one.shape[1:]).sum(1)
                total[part] = grouped.transpose(0, 1).to(total.dtype)
        return grads

    @staticmethod
    def _check(bounds: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert bounds.dtype == args[0].dtype == torch.int32
        longest = max(end - begin for begin, end in pairwise(bounds.tolist()))
        assert args[1:5] == (longest, longest, 0.0, True) and kwargs.get("window_size_right") in (None, 0)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        """[heads, queries, keys] of one document, its queries, and query heads of a key/value head."""
        group, left = q.shape[1] // k.shape[1], kwargs.get("window_size_left")
        queries = _heads(q, 1)
        scores = queries @ _heads(k, group).mT * kwargs["scale"]
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        visible = (distance >= 0) & (distance <= (len(q) if left is None or left < 0 else left))
        return scores.masked_fill(~visible, -math.inf), queries, group

    def put_in(self) -> Operators:
        """What torch calls to activate the implementation; this object is its own handle."""
        return self

    def remove(self) -> None:
        pass


def _documents(bounds: Tensor) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise(bounds.tolist()) if begin < end]


def _heads(part: Tensor, repeats: int) -> Tensor:
    """[tokens, heads, dim] -> fp32 [heads * repeats, tokens, dim]."""
    return part.float().transpose(0, 1).repeat_interleave(repeats, dim=0)


@pytest.fixture(autouse=True)
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are treated as those of a GPU; the packages' own functions are stand-ins too."""
    monkeypatch.setattr(kernels, "FLASH_DEVICE", "cpu")
    monkeypatch.setattr(wrapper, "_lazy_imports", lambda *args, **kwargs: (None, Kernel(), None, None, None))
    monkeypatch.setattr(wrapper, "_loaded_implementation", None)
    flash_obstacle.cache_clear()
    yield
    flash_obstacle.cache_clear()
    kernels._activate(None)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    found, library = Operators(), Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", found.forward)
    library.impl("_flash_attention_backward", found.backward)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", found.put_in)
    yield found
    kernels._activate(None)
    library._destroy()


def inputs_of(rows: int = 2, seq: int = 300, dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, heads, seq, 8, generator=generator).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("backend", KEEPS_SCORES)
def test_torchs_operators_stand_for_the_backend(
    operators: Operators, backend: str, window: int | None
) -> None:
    query, key, value = inputs_of()
    kernel = make_kernel(backend, BOUNDS, query, How(0.3, window, 0.0, {}))
    assert isinstance(kernel, CudaFlash)
    operators.calls.clear()
    out, lse = kernel.forward(query, key, value)
    grads = kernel.backward(torch.ones_like(out), query, key, value, out, lse)
    name = "FA3" if backend == "flash_attention_3" else None
    assert operators.calls == [("forward", name), ("backward", name)]
    assert lse is not None and lse.shape == query.shape[:3]
    wide = [part.float().requires_grad_() for part in (query, key, value)]
    want = document_attention(*wide, BOUNDS, 0.3, window)
    wanted = torch.autograd.grad(want.sum(), wide)
    for mine, true in zip((out, *grads), (want, *wanted), strict=True):
        assert (mine.float() - true).norm() < 1e-2 * true.norm()
    assert attention_remarks(backend, CPU, BF16, 8) == (
        ["lean layers run flash_attention_2 through torch's own FlashAttention 2"]
        if backend == "flash_attention_2"
        else []
    )


def test_each_backend_gets_its_own_operators_again(operators: Operators) -> None:
    for backend, name in (
        ("flash_attention_3", "FA3"),
        ("flash_attention_2", None),
        ("flash_attention_3", "FA3"),
    ):
        assert isinstance(make_kernel(backend, BOUNDS, inputs_of()[0], HOW), CudaFlash)
        assert current_flash_attention_impl() == name


def test_the_comparison_is_made_once_a_backend(operators: Operators) -> None:
    for _ in range(3):
        make_kernel("flash_attention_2", BOUNDS, inputs_of()[0], HOW)
    assert len(operators.calls) == 4, "forward and backward, with a window and without"


@pytest.mark.parametrize(
    ("backend", "dtype", "why"),
    [
        ("kernels-community/flash-attn2", BF16, "no operators of kernels-community/flash-attn2"),
        ("flex_attention", BF16, "no operators of flex_attention"),
        ("sdpa", torch.float32, "16-bit numbers, not torch.float32"),
    ],
)
def test_what_has_no_operator_runs_again_and_says_so(
    operators: Operators, backend: str, dtype: torch.dtype, why: str
) -> None:
    assert isinstance(make_kernel(backend, BOUNDS, inputs_of(dtype=dtype)[0], HOW), Recompute)
    (remark,) = attention_remarks(backend, CPU, dtype, 8)
    assert "forward again" in remark and why in remark
    assert not operators.calls


@pytest.mark.parametrize("backend", KEEPS_SCORES)
def test_other_numbers_are_noticed(operators: Operators, backend: str) -> None:
    operators.error = 1.2
    assert isinstance(make_kernel(backend, BOUNDS, inputs_of()[0], HOW), Recompute)
    assert f"not give the numbers of {backend}" in attention_remarks(backend, CPU, BF16, 8)[0]
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("flash_attention_2", "flash_attention_2 do not run here"),
        ("flash_attention_3", "flash_attn_interface"),
    ],
)
def test_operators_that_are_not_there_are_noticed(backend: str, why: str) -> None:
    """As on this machine: torch has none for the CPU, and the package of FlashAttention 3 is not installed."""
    assert isinstance(make_kernel(backend, BOUNDS, inputs_of()[0], HOW), Recompute)
    assert why in attention_remarks(backend, CPU, BF16, 8)[0]
    assert current_flash_attention_impl() is None


def test_what_only_the_package_computes_goes_to_it(operators: Operators) -> None:
    for how in (How(0.3, None, 0.0, {"softcap": 30.0}), How(0.3, None, 0.1, {})):
        assert isinstance(make_kernel("flash_attention_2", BOUNDS, inputs_of()[0], how), Recompute)


def test_nothing_is_said_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FLASH_DEVICE", "cuda")
    assert attention_remarks("sdpa", CPU, BF16, 8) == []


@pytest.mark.parametrize("heads", [0, 1])
def test_a_lean_model_of_two_rows_runs_forward_once(operators: Operators, heads: int) -> None:
    plain = model_of("qwen3", lean=False).bfloat16()
    want = run(plain)
    lean = model_of("qwen3", lean=False).bfloat16()
    settings = AttentionSettings("flash_attention_2", 1, 0, None, lean=True)
    memory = MemoryConfig(mlp_tile=5, attention_heads=heads, offload=True)
    install_attention(spec.attentions(lean), lean.config, settings)
    install_lean(spec.blocks(lean), spec.attentions(lean), settings, "qwen3", memory, stage=0)
    make_kernel("flash_attention_2", BOUNDS, inputs_of()[0], HOW)
    operators.calls.clear()
    got = run(lean)
    calls, layers = (4 if heads else 1), 2
    assert [name for name, _ in operators.calls].count("forward") == layers * calls
    assert [name for name, _ in operators.calls].count("backward") == layers * calls
    for name, mine, true in (("out", got[0], want[0]), *((n, got[1][n], want[1][n]) for n in want[1])):
        assert (mine.float() - true.float()).norm() < 3e-2 * true.float().norm(), name


def test_start_up_summary_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply_parallelism` asks with the model's type and head size."""
    import stack.parallel.apply as apply

    asked: list[Any] = []
    monkeypatch.setattr(apply, "attention_remarks", lambda *given: asked.append(given) or ["said"])
    model = model_of("qwen3", lean=False).bfloat16()
    topology: Any = SimpleNamespace(sp=1, sp_rank=0, sp_group=None, device=CPU)
    model_spec: Any = SimpleNamespace(family="qwen3", logit_scale=1.0, softcap=None, head_dim=8)
    memory = MemoryConfig(lean=True, mlp_tile=5)
    applied = apply.apply_parallelism(model, model_spec, memory, "sdpa", 0, topology)
    assert applied.lean and "said" in applied.remarks and asked == [("sdpa", CPU, BF16, 8)]
    memory = MemoryConfig(lean=False, mlp_tile=5)
    applied = apply.apply_parallelism(model_of("qwen3", lean=False), model_spec, memory, "sdpa", 0, topology)
    assert applied.remarks == [] and len(asked) == 1


def test_the_forecast_knows_which_kernels_run_forward_once() -> None:
    """At a million tokens attention is most of a step: run again it costs a third of its FLOPs in addition, 2 of 7."""
    seconds = {}
    for backend in (*KEEPS_SCORES, "kernels-community/flash-attn2"):
        run = planned("+exp=qwen3_1m", f"model.attention={backend}", world=8)
        seconds[backend] = run.plan().forecast.time.parts["attention"]
    assert seconds["flash_attention_2"] == seconds["sdpa"]
    assert seconds["kernels-community/flash-attn2"] == pytest.approx(seconds["sdpa"] * 4.5 / 3.5)
    assert seconds["flash_attention_3"] < seconds["sdpa"]
