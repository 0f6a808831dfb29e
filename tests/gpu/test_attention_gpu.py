"""Every attention kernel that is installed, in bf16, against the masked definition in fp32: outputs, gradients, documents
kept apart, memory; and a model trained with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stack.config.model_checks import KEEPS_SCORES
from stack.ops.attention_kernel import CpuFlash, CudaFlash
from stack.ops.reference import document_attention
from stack.parallel.kernels import attention_remarks, make_kernel
from stack.parallel.ulysses import How, ulysses_attention
from tests.gpu.backends import BACKENDS, attention_or_skip
from tests.gpu.machine import DEVICE, WORLD
from tests.gpu.rows import LRS, STEPS
from tests.parity import reference, steps_side
from tests.parity.cases import ParityCase
from tests.parity.conftest import SHAPE
from tests.parity.rank_side import config_of
from tests.ranks import Case, Outcome, run_cases

HEADS, KV_HEADS, DIM, SCALE = 8, 2, 64, 0.125
SHAPES = {  # rows, tokens in a row, document boundaries
    "uneven": (1, 384, [0, 1, 130, 131, 300, 384]),
    "two rows": (2, 300, [0, 65, 300, 301, 428, 600]),
    "one document": (1, 1024, [0, 1024]),
}
WINDOWS = (None, 37)
# bf16 keeps 8 bits: outputs and gradients of these sizes are off by 2e-3 to 5e-3 as a whole. A token too many or too few
# in sight, or a document seen by another, is off by more than 5e-2.
OUTPUT, GRADIENT = 1e-2, 2e-2


def inputs_of(rows: int, seq: int, kv_heads: int = KV_HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads, seq, DIM) for heads in (HEADS, kv_heads, kv_heads)]
    drawn = [torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for shape in shapes]
    return [tensor.requires_grad_() for tensor in drawn]


def weights_like(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)


def wanted(inputs: list[Tensor], bounds: list[int], window: int | None) -> list[Tensor]:
    """Output [rows, heads, seq, dim] and the gradients of q, k and v, all in fp32."""
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    out = document_attention(*wide, torch.tensor(bounds), SCALE, window)
    return [out.detach(), *torch.autograd.grad(out, wide, weights_like(out).float())]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for name, mine, true, limit in zip("oqkv", got, want, (OUTPUT, *(GRADIENT,) * 3), strict=True):
        error = ((mine.float() - true).norm() / true.norm()).item()
        assert error < limit, f"{name}: relative error {error:.1e}"


def attend(module: torch.nn.Module, inputs: list[Tensor], bounds: list[int], window: int | None) -> Tensor:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    out, _ = ulysses_attention(
        module, *inputs, None, scaling=SCALE, sliding_window=window, cu_seq_lens_q=cu_seqlens
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_definition(backend: str, shape: str, window: int | None) -> None:
    module, (rows, seq, bounds) = attention_or_skip(backend), SHAPES[shape]
    inputs = inputs_of(rows, seq)
    out = attend(module, inputs, bounds, window)
    got = [out, *torch.autograd.grad(out, inputs, weights_like(out))]
    assert_close(got, wanted(inputs, bounds, window))


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_do_not_see_each_other(backend: str) -> None:
    module, (rows, seq, bounds) = attention_or_skip(backend), SHAPES["two rows"]
    inputs = [tensor.detach() for tensor in inputs_of(rows, seq)]
    before = attend(module, inputs, bounds, None)
    for tensor in inputs:
        tensor[0, :, 20] += 1.0  # in the first document, which ends at 65
    after = attend(module, inputs, bounds, None)
    assert not torch.equal(before[0, :, 20:65], after[0, :, 20:65])
    assert torch.equal(before[0, :, 65:], after[0, :, 65:]) and torch.equal(before[1], after[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_does_not_grow_with_the_square(backend: str) -> None:
    """At 32,768 tokens a square of booleans alone takes 1 GiB, and the scores of 8 heads in bf16 take 16."""
    module = attention_or_skip(backend)
    if DEVICE == "cpu":
        pytest.skip("memory is measured on a GPU")
    inputs = inputs_of(1, 32_768)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend(module, inputs, [0, 10_000, 32_768], None)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 640 * 2**20, f"{grown / 2**20:.0f} MiB; q is {inputs[0].numel() * 2 / 2**20:.0f}"


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", KEEPS_SCORES)
def test_kernel_of_the_lean_layer(backend: str, shape: str, window: int | None) -> None:
    """It calls torch's flash operators by their internal names; on a card that has them it must take them. Heads in two
    calls, each with its part of one log-sum-exp, as a lean layer makes them."""
    attention_or_skip(backend)
    rows, seq, bounds = SHAPES[shape]
    query, key, value = (tensor.detach() for tensor in inputs_of(rows, seq))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    kernel = make_kernel(backend, cu_seqlens, query, How(SCALE, window, 0.0, {}))
    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else (0, 0)
    if capability >= (8, 0) and (backend != "flash_attention_3" or capability[0] == 9):
        said = attention_remarks(backend, query.device, query.dtype, DIM)
        assert isinstance(kernel, CudaFlash), said
    elif DEVICE == "cpu" and window is None:
        assert isinstance(kernel, CpuFlash)
    out, grads = torch.empty_like(query), [torch.empty_like(part) for part in (query, key, value)]
    of_out, lse = weights_like(out), torch.empty(rows, HEADS, seq, device=DEVICE)
    group = HEADS // KV_HEADS
    calls = [(slice(kv * group, (kv + 1) * group), slice(kv, kv + 1)) for kv in range(KV_HEADS)]
    recomputes = False
    for heads, kv in calls:
        out[:, heads], found = kernel.forward(query[:, heads], key[:, kv], value[:, kv])
        if found is None:
            recomputes = True
        else:
            lse[:, heads] = found
    for heads, kv in calls:
        scores = None if recomputes else lse[:, heads]
        grads[0][:, heads], grads[1][:, kv], grads[2][:, kv] = kernel.backward(
            of_out[:, heads], query[:, heads], key[:, kv], value[:, kv], out[:, heads], scores
        )
    assert_close([out, *grads], wanted([query, key, value], bounds, window))


LEVERS = ("all", "lean")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with heads as large as the kernels want them."""
    torch.manual_seed(5)
    shape = SHAPE | dict(hidden_size=128, head_dim=64, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape))
    folder = str(tmp_path_factory.mktemp("wide"))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(wide: str) -> dict[tuple[str, str], Outcome]:
    """A few steps in bf16 with each backend that is installed, on one start of the ranks."""
    cases, layout = {}, "sp2" if WORLD == 2 else "1"
    for backend in BACKENDS:
        try:
            attention_or_skip(backend)
        except pytest.skip.Exception:
            continue
        for levers in LEVERS:
            cfg = config_of(ParityCase(layout, 3, 1, levers, False, ""), wide, "bf16")
            memory = replace(cfg.memory, loss_tile=100, mlp_tile=75)
            cfg = replace(cfg, memory=memory, model=replace(cfg.model, attention=backend))
            cases[backend, levers] = Case(
                steps_side.run_steps, (cfg, STEPS, LRS), dict(size=2, device=DEVICE)
            )
    named = {f"{backend} {levers}": case for (backend, levers), case in cases.items()}
    done = run_cases(WORLD, named, timeout_s=240, device=DEVICE, init=False)
    return {key: done[" ".join(key)] for key in cases}


@pytest.fixture(scope="module")
def judged(wide: str) -> reference.Curve:
    return reference.train(reference.load(wide), STEPS, LRS)


@pytest.mark.parametrize("levers", LEVERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_trains_with_it(
    backend: str, levers: str, trained: dict[tuple[str, str], Outcome], judged: reference.Curve
) -> None:
    attention_or_skip(backend)
    got = trained[backend, levers].get()[0][1:]
    assert [step.loss for step in got] == pytest.approx(judged.losses, rel=1e-2)
    assert [step.result.grad_norm for step in got] == pytest.approx(judged.norms, rel=5e-2)
