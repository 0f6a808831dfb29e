"""The tiled block against the plain one: outputs and all gradients, alone and inside a checkpointed layer."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stack.ops.tiled_mlp import tiled_block


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 6, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        return self.down(self.dropout(torch.nn.functional.silu(self.up(hidden))))


def trainable(module):
    return [param for param in module.parameters() if param.requires_grad]


def run(mlp, hidden, apply):
    mlp.zero_grad()
    hidden = hidden.clone().requires_grad_()
    output = apply(hidden)
    output.square().sum().backward()
    return output.detach(), hidden.grad, [param.grad for param in mlp.parameters()]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 9, 16])
@pytest.mark.parametrize("tile", [1, 4, 8, 100])
def test_equals_plain_block(tokens, tile):
    mlp = Mlp()
    hidden = torch.randn(1, tokens, 6)
    want = run(mlp, hidden, mlp)
    got = run(mlp, hidden, lambda x: tiled_block(x, mlp, trainable(mlp), tile))
    torch.testing.assert_close(got, want)
    assert got[2][0] is None, "a parameter that took no part has no gradient"


def test_no_token_at_all():
    mlp = Mlp()
    got = run(mlp, torch.randn(1, 0, 6), lambda x: tiled_block(x, mlp, trainable(mlp), 4))
    assert got[0].shape == (1, 0, 6)


def test_frozen_parts_and_input_without_gradient():
    mlp = Mlp()
    mlp.up.requires_grad_(False)
    hidden = torch.randn(1, 5, 6)
    mlp(hidden).square().sum().backward()
    want = mlp.down.weight.grad.clone()
    mlp.zero_grad()
    tiled_block(hidden, mlp, trainable(mlp), 2).square().sum().backward()
    torch.testing.assert_close(mlp.down.weight.grad, want)
    assert mlp.up.weight.grad is None


def test_dropout_is_the_same_in_backward():
    mlp = Mlp(dropout=0.5)
    hidden = torch.randn(1, 9, 6, requires_grad=True)
    torch.manual_seed(7)
    output = tiled_block(hidden, mlp, trainable(mlp), 4)
    got = torch.autograd.grad(output.sum(), [hidden, mlp.up.weight])
    torch.manual_seed(7)
    plain = torch.cat([mlp(part) for part in hidden.split(4, dim=1)], dim=1)
    torch.testing.assert_close(output, plain)
    torch.testing.assert_close(got, torch.autograd.grad(plain.sum(), [hidden, mlp.up.weight]))


def test_low_precision_parameter_gradients_are_summed_in_fp32():
    mlp = Mlp().bfloat16()
    hidden = torch.randn(1, 512, 6, dtype=torch.bfloat16)
    exact = Mlp()
    exact.load_state_dict({name: value.float() for name, value in mlp.state_dict().items()})
    want = run(exact, hidden.float(), exact)[2][1]
    tiled = run(mlp, hidden, lambda x: tiled_block(x, mlp, trainable(mlp), 4))[2][1].float()
    plain = run(mlp, hidden, mlp)[2][1].float()
    assert (tiled - want).norm() <= 1.5 * (plain - want).norm()


def test_recomputation_of_a_layer_skips_the_block():
    """Block calls with two tiles: forward 2, recomputed layer 0, backward 2."""
    mlp = Mlp()
    norm = nn.LayerNorm(6)

    def layer(x):
        return x + tiled_block(norm(x), mlp, trainable(mlp), 4)

    hidden = torch.randn(1, 8, 6, requires_grad=True)
    want = torch.autograd.grad(
        (hidden + mlp(norm(hidden))).square().sum(), [hidden, mlp.up.weight, norm.weight]
    )
    mlp.calls = 0
    loss = checkpoint(layer, hidden, use_reentrant=False).square().sum()
    got = torch.autograd.grad(loss, [hidden, mlp.up.weight, norm.weight])
    torch.testing.assert_close(got, want)
    assert mlp.calls == 4


def test_block_in_front_of_a_norm_is_recomputed():
    """A norm behind the block saves the block's output, so the recomputation has to run it."""
    mlp, norm = Mlp(), nn.LayerNorm(6)

    def layer(x):
        return x + norm(tiled_block(x, mlp, trainable(mlp), 4))

    hidden = torch.randn(1, 8, 6, requires_grad=True)
    want = torch.autograd.grad(
        (hidden + norm(mlp(hidden))).square().sum(), [hidden, mlp.up.weight, norm.weight]
    )
    got = torch.autograd.grad(
        checkpoint(layer, hidden, use_reentrant=False).square().sum(), [hidden, mlp.up.weight, norm.weight]
    )
    torch.testing.assert_close(got, want)


def test_tile_below_one_is_refused():
    with pytest.raises(ValueError, match="tile=0"):
        tiled_block(torch.randn(1, 2, 6), Mlp(), [], 0)
