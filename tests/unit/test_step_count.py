"""What the count of a step makes of operators that torch runs differently where a mode looks on."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stack.bench.step_count import Counted


def test_the_gradient_of_a_lookup_is_written_into_zeros_and_not_into_a_copy_of_them() -> None:
    table = torch.ones(1024, 1024, requires_grad=True)
    with Counted(torch.device("cpu")) as live:
        looked_up = table[torch.arange(4)].sum()
        live.restart("backward")
        looked_up.backward()
    assert 4 * 2**20 <= live.phases["backward"].num_bytes < 5 * 2**20


def test_what_torch_compile_left_without_a_size_is_not_counted() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    left = mode.from_tensor(torch.ones(6, 7))
    assert not isinstance(left.untyped_storage().nbytes(), int)
    with Counted(torch.device("cpu")) as live:
        assert isinstance(live.at_start, int)
