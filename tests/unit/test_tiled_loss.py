"""The tiled loss against the plain one: value and all gradients, on sizes that do not divide."""

import itertools

import pytest
import torch

from stack.ops.reference import token_loss_sum
from stack.ops.tiled_loss import tiled_token_loss_sum
from stack.ops.token_loss import IGNORE, LossOptions

HIDDEN, VOCAB = 8, 23
OPTIONS = {
    "plain": LossOptions(),
    "softcap": LossOptions(softcap=3.0),
    "scaled": LossOptions(logit_scale=0.25),
    "z_loss": LossOptions(z_loss=0.1),
    "smoothing": LossOptions(label_smoothing=0.1),
    "all": LossOptions(logit_scale=1.5, softcap=4.0, label_smoothing=0.2, z_loss=0.05),
}


def inputs(tokens: int, dtype=torch.float64, bias: bool = False):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    offset = torch.randn(VOCAB, generator=generator, dtype=dtype, requires_grad=True) if bias else None
    labels = torch.randint(0, VOCAB, (tokens,), generator=generator)
    return hidden, weight, offset, labels


def gradients(loss, tensors):
    return torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("tokens", "tile", "bias"),
    [
        (1, 1, False),
        (2, 4, True),
        (3, 1, False),
        (5, 4, True),
        (7, 3, False),
        (9, 8, False),
        (16, 5, True),
        (16, 99, False),
    ],
)
def test_equals_plain_loss(tokens, tile, bias, name):
    tensors = inputs(tokens, torch.float32, bias)
    tensors[3][::3] = IGNORE
    factor = 0.37  # whatever multiplies the loss afterwards has to reach every gradient
    plain = factor * token_loss_sum(*tensors, OPTIONS[name])
    tiled = factor * tiled_token_loss_sum(*tensors, tile, OPTIONS[name])
    torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=1e-6)
    for got, want in zip(gradients(tiled, tensors[:3]), gradients(plain, tensors[:3]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_uneven_valid_labels_match_finite_differences():
    """Tiles with 0, 1, 3 and 4 targets: the gradient is that of the number returned."""
    hidden, weight, _, labels = inputs(16, torch.float64)
    labels[:4], labels[5:8], labels[8] = IGNORE, IGNORE, IGNORE
    loss = tiled_token_loss_sum(hidden, weight, None, labels, 4, LossOptions())
    grad = gradients(loss, [weight])[0]
    # Losses are summed in fp32, so the step is large and the tolerance that of a central difference in fp32.
    step = 1e-2
    for row, column in itertools.islice(itertools.product(range(0, VOCAB, 5), (2,)), 5):
        shifted = [weight.detach().clone() for _ in range(2)]
        shifted[0][row, column] += step
        shifted[1][row, column] -= step
        high, low = (token_loss_sum(hidden, w, None, labels, LossOptions()).item() for w in shifted)
        assert grad[row, column].item() == pytest.approx((high - low) / (2 * step), abs=2e-3)


def test_no_target_gives_zero_and_zero_gradients():
    hidden, weight, _, labels = inputs(6, torch.float32)
    labels[:] = IGNORE
    loss = tiled_token_loss_sum(hidden, weight, None, labels, 4, LossOptions(z_loss=0.1, label_smoothing=0.1))
    assert loss.item() == 0.0
    assert all(not grad.any() for grad in gradients(loss, [hidden, weight]))


def test_no_gradient_work_without_grad_mode(monkeypatch):
    import stack.ops.tiled_loss as module

    seen = []
    real = module._tile_loss
    monkeypatch.setattr(module, "_tile_loss", lambda *args: seen.append(args[-1]) or real(*args))
    hidden, weight, _, labels = inputs(6, torch.float32)
    with torch.no_grad():
        tiled_token_loss_sum(hidden, weight, None, labels, 4, LossOptions())
    assert seen == [False, False]


def test_frozen_head_and_frozen_body():
    hidden, weight, _, labels = inputs(7, torch.float32)
    want = gradients(token_loss_sum(hidden, weight, None, labels, LossOptions()), [hidden, weight])
    only_hidden = tiled_token_loss_sum(hidden, weight.detach(), None, labels, 3, LossOptions())
    torch.testing.assert_close(gradients(only_hidden, [hidden])[0], want[0])
    only_weight = tiled_token_loss_sum(hidden.detach(), weight, None, labels, 3, LossOptions())
    torch.testing.assert_close(gradients(only_weight, [weight])[0], want[1])


def test_fp16_gradients_survive_a_small_scale():
    """Times 1 / targets, fp16 gradients would underflow; with the loss scale on top they must come out right."""
    hidden, weight, _, labels = inputs(12, torch.float32)
    half = [hidden.detach().half().requires_grad_(), weight.detach().half().requires_grad_()]
    loss = tiled_token_loss_sum(*half, None, labels, 5, LossOptions())
    got = gradients(loss * 1e-6 * 2.0**16, half)
    want = gradients(
        token_loss_sum(hidden, weight, None, labels, LossOptions()) * 1e-6 * 2.0**16, [hidden, weight]
    )
    for mine, true in zip(got, want, strict=True):
        torch.testing.assert_close(mine.float(), true, rtol=2e-2, atol=2e-3 * true.abs().max().item())


def test_logits_of_the_whole_sequence_never_exist():
    """Largest tensor made on the way: one tile of logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.numel())
            return out

    hidden = torch.randn(512, HIDDEN, requires_grad=True)
    weight = torch.randn(300, HIDDEN, requires_grad=True)
    with Watch():
        tiled_token_loss_sum(
            hidden, weight, None, torch.zeros(512, dtype=torch.long), 16, LossOptions()
        ).backward()
    assert largest[0] <= 16 * 300
