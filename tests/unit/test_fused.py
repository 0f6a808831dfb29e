"""Fused kernels: where they go, what they compute, and what is left alone."""

from __future__ import annotations

import copy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from stack.errors import ModelError
from stack.models import spec
from stack.models.registry import FAMILIES
from stack.parallel.fused import install_fused, rms_norms
from tests.unit.models_rig import EXPERTS, SMALL

SHAPE = SMALL | EXPERTS
CPU = torch.device("cpu")


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, pad_token_id=None, **SHAPE))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.to(dtype)


def fuse(model: Any, kernels: str, device: torch.device = CPU) -> list[str]:
    return install_fused(rms_norms(model), spec.mlps(model), spec.attentions(model), kernels, device)


def changed(model: nn.Module) -> set[str]:
    """Kinds of modules with a forward of their own."""
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


def outcome(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, use_cache=False).logits
    model.zero_grad()
    F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
    return logits.detach(), {name: param.grad for name, param in model.named_parameters()}


LEAN = [name for name, family in FAMILIES.items() if family.lean]


@pytest.mark.parametrize(("family", "kernels"), [*((name, "torch") for name in LEAN), ("qwen3", "compiled")])
def test_parts_are_exact_in_fp32_with_all_gradients(family: str, kernels: str) -> None:
    plain, fused = model_of(family), model_of(family)
    assert fuse(fused, kernels) == []
    names = {type(norm).__name__ for norm in rms_norms(fused)}
    assert len(names) == 1 and changed(plain) == set()
    assert changed(fused) == names | ({"Qwen3Attention", "Qwen3MLP"} if kernels == "compiled" else set())
    (logits, grads), (want, wanted) = outcome(fused), outcome(plain)
    # Compiled sums and exponentials round as the CPU's vectors are wide: 1.1e-6 apart with AVX2, below 1e-6 with AVX512.
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=3e-6)
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("size", [8, 33, 256])
def test_norms_in_bf16_are_as_near_to_the_truth_as_the_models_own(size: int) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    generator = torch.Generator().manual_seed(0)
    norm = Qwen3RMSNorm(size, 1e-6)
    norm.weight.data += 0.1 * torch.randn(size, generator=generator)
    hidden, grad = 3 * torch.randn(2, 3, 50, size, generator=generator).to(torch.bfloat16)
    norm.to(torch.bfloat16)
    exact: Any = copy.deepcopy(norm).double()
    # Its own forward computes in fp32 whatever it gets.
    exact.forward = lambda x: exact.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def results(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        x = hidden.to(dtype).requires_grad_()
        out = module(x)
        return [
            part.double()
            for part in (out, *torch.autograd.grad(out, [x, *module.parameters()], grad.to(dtype)))
        ]

    truth, own = results(exact, torch.float64), results(norm, torch.bfloat16)
    install_fused([norm], [], [], "torch", CPU)
    for mine, other, true in zip(results(norm, torch.bfloat16), own, truth, strict=True):
        # One rounding to 8 bits is 2^-8 of a value at the most.
        assert ((mine - true).abs().max() / true.abs().max()).item() < 2**-8
        assert (mine - true).abs().mean() <= (other - true).abs().mean() * 1.01


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_other_norms_keep_their_own_forward_and_say_so(family: str) -> None:
    model = model_of(family)
    remarks = fuse(model, "torch")
    assert changed(model) == set()
    assert len(remarks) == 1 and "RMSNorm keeps its own forward: it is no plain RMSNorm" in remarks[0]


def test_an_eps_in_another_place_is_seen() -> None:
    class AddsEpsToTheRoot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)

    norm = AddsEpsToTheRoot()
    assert install_fused(rms_norms(norm), [], [], "torch", CPU) != [] and changed(norm) == set()


def test_layer_norms_are_no_candidates() -> None:
    model = model_of("gpt_neox")
    assert rms_norms(model) == [] and fuse(model, "torch") == []


def test_auto_is_nothing_on_the_cpu_and_torch_on_a_gpu() -> None:
    model = model_of("qwen3")
    assert fuse(model, "auto") == [] and changed(model) == set()
    fuse(model, "none", torch.device("cuda"))
    assert changed(model) == set()
    fuse(model, "auto", torch.device("cuda"))
    assert changed(model) == {"Qwen3RMSNorm"}


def test_liger_is_refused_where_it_is_missing() -> None:
    with pytest.raises(
        ModelError, match=r"memory\.fused_kernels=liger: cannot import .*pip install '\.\[liger\]'"
    ):
        fuse(model_of("qwen3"), "liger")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A module with Liger's names that computes in torch and counts its calls."""
    calls = {"norm": 0, "rope": 0, "swiglu": 0}
    module = ModuleType("liger_kernel.transformers.functional")

    def rms_norm(x: Tensor, weight: Tensor, eps: float, *, in_place: bool = True) -> Tensor:
        calls["norm"] += 1
        assert not in_place
        return F.rms_norm(x, weight.shape, weight, eps)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        calls["rope"] += 1
        cos, sin = cos[:, None], sin[:, None]

        def turn(part: Tensor) -> Tensor:
            return (
                part * cos
                + torch.cat([-part[..., part.shape[-1] // 2 :], part[..., : part.shape[-1] // 2]], -1) * sin
            )

        return turn(q), turn(k)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        calls["swiglu"] += 1
        return F.silu(gate) * up

    for name, function in {"liger_rms_norm": rms_norm, "liger_rope": rope, "liger_swiglu": swiglu}.items():
        setattr(module, name, function)
    parents = {"liger_kernel": SimpleNamespace(), "liger_kernel.transformers": SimpleNamespace()}
    for name, parent in (parents | {module.__name__: module}).items():
        monkeypatch.setitem(sys.modules, name, parent)
    return calls


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_liger_serves_norms_rotary_and_swiglu_of_one_instance(family: str, liger: dict[str, int]) -> None:
    plain, fused = model_of(family), model_of(family)
    fuse(fused, "liger")
    (logits, grads), want, layers = outcome(fused), None, SHAPE["num_hidden_layers"]
    norms = 4 if family.startswith("qwen3") else 2
    assert liger == {
        "norm": norms * layers + 1,
        "rope": layers,
        "swiglu": 0 if family == "qwen3_moe" else layers,  # experts are stacked tensors, no MLP modules
    }
    liger.update(dict.fromkeys(liger, 0))
    want, wanted = outcome(plain)
    assert not any(liger.values())  # the other model of the same class is untouched
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_liger_leaves_other_activations_and_rotations_alone(liger: dict[str, int]) -> None:
    gelu = model_of("llama")
    for mlp in spec.mlps(gelu):
        mlp.act_fn = nn.GELU()
    fuse(gelu, "liger")
    assert not {"LlamaMLP"} & changed(gelu)
    glm = model_of("glm")  # turns pairs of neighbours, half of each head
    fuse(glm, "liger")
    assert not {"GlmAttention", "GlmMLP"} & changed(glm)
