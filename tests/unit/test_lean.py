"""What a lean layer runs, how often, and what it holds."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import stack.ops.attention_kernel as attention_kernel
import stack.parallel.lean as lean_module
from stack.bench.live_bytes import LiveBytes
from stack.config.schema import MemoryConfig
from stack.models import spec
from stack.models.registry import FAMILIES
from stack.ops.attention_kernel import CpuFlash, Recompute, backward_dtype
from stack.ops.host_store import HostStore
from stack.ops.reference import document_attention
from stack.parallel.lean import install_lean, lean_obstacle
from stack.parallel.ulysses import AttentionSettings, install_attention
from tests.unit.models_rig import EXPERTS, SMALL

SHAPE = SMALL | EXPERTS
LEAN_FAMILIES = [name for name, family in FAMILIES.items() if family.lean]


def model_of(family: str, lean: bool, memory: MemoryConfig | None = None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE))
    settings = AttentionSettings("sdpa", 1, 0, None, lean)
    install_attention(spec.attentions(model), model.config, settings)
    if lean:
        memory = memory or MemoryConfig(mlp_tile=5, offload=True)
        install_lean(spec.blocks(model), spec.attentions(model), settings, family, memory, stage=0)
    return model


def run(model, rows: int = 2, seq: int = 12, bounds: tuple[int, ...] = (0, 5, 12, 13, 24)):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (rows, seq), generator=generator)
    hidden = spec.body(model)(
        input_ids=ids,
        position_ids=torch.arange(seq).repeat(rows, 1),
        use_cache=False,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
    ).last_hidden_state
    loss = (hidden * torch.randn(hidden.shape, generator=generator)).sum()
    names = [name for name, _ in model.named_parameters() if "lm_head" not in name]
    grads = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
    return hidden.detach(), dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("family", LEAN_FAMILIES)
@pytest.mark.parametrize(("tile", "heads"), [(5, 0), (5, 1), (5, 3), (64, 1)])
def test_equals_the_models_own_block(family, tile, heads):
    """The vouching for each family with a `lean` entry: outputs and all gradients."""
    want = run(model_of(family, lean=False))
    got = run(model_of(family, True, MemoryConfig(mlp_tile=tile, attention_heads=heads, offload=True)))
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    for name, grad in want[1].items():
        atol = 1e-6 * grad.abs().max().item()
        torch.testing.assert_close(got[1][name], grad, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("tile", [5, 64])
def test_offload_is_bit_equal(tile):
    on = run(model_of("qwen3", True, MemoryConfig(mlp_tile=tile, offload=True)))
    off = run(model_of("qwen3", True, MemoryConfig(mlp_tile=tile, offload=False)))
    assert torch.equal(on[0], off[0])
    assert all(torch.equal(on[1][name], off[1][name]) for name in on[1])


def test_counts_of_one_layer(monkeypatch):
    """Attention forward once, MLP forward twice, two exchanges in forward; per tile of 5, 5 and 2 tokens."""
    counts = {"attention": 0, "attention backward": 0, "exchange": 0, "mlp": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(CpuFlash, "forward", counted("attention", CpuFlash.forward))
    monkeypatch.setattr(CpuFlash, "backward", counted("attention backward", CpuFlash.backward))
    monkeypatch.setattr(lean_module, "exchange", counted("exchange", lean_module.exchange))
    model = model_of("qwen3", True)
    for block in spec.blocks(model):
        mlp = cast(Any, block).mlp
        mlp.forward = counted("mlp", mlp.forward)
    with torch.no_grad():
        spec.body(model)(
            input_ids=torch.arange(12)[None],
            position_ids=torch.arange(12)[None],
            use_cache=False,
            cu_seq_lens_q=torch.tensor([0, 12], dtype=torch.int32),
        )
    layers, tiles = 2, 3
    assert counts == {
        "attention": layers,
        "attention backward": 0,
        "exchange": 2 * layers,
        "mlp": layers * tiles,
    }
    counts.update(dict.fromkeys(counts, 0))
    run(model, rows=1, bounds=(0, 12))
    assert counts["attention"] == counts["attention backward"] == layers
    assert counts["mlp"] == 2 * layers * tiles
    assert counts["exchange"] == 5 * layers


def test_host_buffers_are_used_again_from_step_to_step():
    store = HostStore(offload=True, pin_memory=False)
    tensors = [torch.randn(3, 4), torch.randn(2)]
    first = store.keep(tensors)
    buffers = {buffer.data_ptr() for buffer in first.host}
    taken = first.take()
    assert all(
        torch.equal(mine, true) and mine is not true for mine, true in zip(taken, tensors, strict=True)
    )
    assert {buffer.data_ptr() for buffer in store.keep(tensors).host} == buffers


def test_kept_is_a_copy():
    store, tensor = HostStore(offload=True, pin_memory=False), torch.ones(4)
    kept = store.keep([tensor])
    tensor.zero_()
    assert kept.take()[0].tolist() == [1.0] * 4


@pytest.mark.parametrize("bounds", [[0, 9], [0, 1, 4, 4, 9]])
def test_kernels_agree_with_the_definition(bounds):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    grad, cu_seqlens = torch.randn_like(query), torch.tensor(bounds, dtype=torch.int32)
    inputs = [part.clone().requires_grad_() for part in (query, key, value)]
    want = document_attention(*inputs, cu_seqlens, 0.3)
    want_grads = torch.autograd.grad(want, inputs, grad)
    plain = Recompute(lambda q, k, v: document_attention(q, k, v, cu_seqlens, 0.3))
    for kernel in (CpuFlash(bounds, 0.3), plain):
        out, lse = kernel.forward(query, key, value)
        torch.testing.assert_close(out, want.detach())
        torch.testing.assert_close(kernel.backward(grad, query, key, value, out, lse), want_grads)


def backward_in(dtype: torch.dtype, kv_heads: int, seq: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """[errors of dq, dk and dv against fp64, bytes at the most beside what goes in and comes out] of bf16 tensors."""
    monkeypatch.setattr(attention_kernel, "backward_dtype", lambda given: dtype)
    generator, bounds = torch.Generator().manual_seed(0), [0, seq // 3, seq]
    sizes = [(1, heads, seq, 32) for heads in (2 * kv_heads, kv_heads, kv_heads, 2 * kv_heads)]
    query, key, value, grad = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    kernel = CpuFlash(bounds, 0.2)
    out, lse = kernel.forward(query, key, value)
    with LiveBytes() as live:
        start = live.device
        grads = kernel.backward(grad, query, key, value, out, lse)
        beside = live.peak_device - start - sum(part.nbytes for part in grads)
    inputs = [part.double().requires_grad_() for part in (query, key, value)]
    want = document_attention(*inputs, torch.tensor(bounds), 0.2)
    wanted = torch.autograd.grad(want, inputs, grad.double())
    assert all(part.dtype == torch.bfloat16 for part in grads)
    return [
        *((mine.double() - true).norm() / true.norm() for mine, true in zip(grads, wanted, strict=True)),
        beside,
    ]


def test_backward_in_fp32_is_more_exact_and_holds_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    *narrow, _ = backward_in(torch.bfloat16, 2, 300, monkeypatch)
    *wide, _ = backward_in(torch.float32, 2, 300, monkeypatch)
    assert all(one < other for one, other in zip(wide, narrow, strict=True))
    (*_, beside), (*_, of_more) = (backward_in(torch.float32, heads, 300, monkeypatch) for heads in (2, 6))
    # Of the longer document in fp32: q, out and their gradients, dk and dv of a query head, k and v, the sums of dk and dv.
    document, head = 200, 200 * 32 * 4
    assert of_more == beside <= (6 + 2 + 2) * head + 2 * 4 * document


@pytest.mark.parametrize(("has", "want"), [(True, torch.bfloat16), (False, torch.float32)])
def test_backward_goes_by_what_the_processor_has(
    has: bool, want: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = dict.fromkeys((torch.bfloat16, torch.float16), lambda: has)
    monkeypatch.setattr(attention_kernel, "_FAST_PRODUCTS", asked)
    assert backward_dtype(torch.bfloat16) == want
    assert backward_dtype(torch.float32) == torch.float32 and backward_dtype(torch.float64) == torch.float64
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert backward_dtype(torch.bfloat16) == torch.float32


def test_torch_still_says_what_the_processor_has() -> None:
    """By functions that torch does not document."""
    assert all(isinstance(ask(), bool) for ask in attention_kernel._FAST_PRODUCTS.values())


def test_models_that_do_not_fit_are_told_why():
    model = model_of("qwen3", lean=False)
    blocks = spec.blocks(model)
    assert lean_obstacle(blocks, "qwen3", model.config) is None
    assert "gemma2" in (lean_obstacle(blocks, "gemma2", model.config) or "")
    assert "several times" in (lean_obstacle([blocks[0], blocks[0]], "qwen3", model.config) or "")
    model.config.attention_dropout = 0.1
    assert "dropout" in (lean_obstacle(blocks, "qwen3", model.config) or "")
