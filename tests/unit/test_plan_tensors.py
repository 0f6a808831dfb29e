"""Tensors that are only a size live as long as real ones do, and ZeRO-3's rules hold."""

from __future__ import annotations

from collections.abc import Sequence

from stack.plan.forecast import MLP
from stack.plan.lean import head_calls, tiles
from stack.plan.operators import Capture, Operators
from stack.plan.settings import resolve
from stack.plan.tensors import INDEX, Ledger, T, backward
from stack.plan.zero3 import Module, Param, Zero3, ZeroSettings
from tests.unit.plan_rig import configured

PART = INDEX[MLP]


def _operators(**settings: int) -> Operators:
    ledger = Ledger()
    zero = Zero3(ledger, ZeroSettings(**({"world": 4, "width": 2, "gathers": False} | settings)))  # type: ignore[arg-type]
    return Operators(ledger, zero, 2, fused_norms=False)


def test_a_tensor_dies_with_its_last_view() -> None:
    op = _operators()
    whole = op.new(100, PART)
    view = op.view(whole, 30)
    del whole
    assert op.ledger.live == 100
    del view
    assert op.ledger.live == 0 and op.ledger.peaks()[""].num_bytes == 100


def test_backward_frees_what_was_saved_and_gives_every_gradient_once() -> None:
    op, param = _operators(), Param("w", 50)
    capture = Capture([param])
    given = op.new(10, PART)
    with op.capturing(capture):
        source = capture.input(given)
        hidden = op.silu(op.linear(source, param, 40, PART), PART)
    assert op.ledger.live == 10 + 40 + 40
    backward([(hidden, op.new(40, PART))])
    del hidden, source
    assert set(capture.found) == {param} and capture.found[param].size == 100
    (grad,) = capture.close()
    assert grad is not None and grad.size == 10
    assert op.ledger.live == 10 + 10


def test_gradients_of_two_uses_add_up_in_place_unless_somebody_looks_at_them() -> None:
    op = _operators()
    capture = Capture([])
    given = op.new(8, PART)
    with op.capturing(capture):
        source = capture.input(given)
        total = op.add(op.silu(source, PART), op.silu(source, PART), PART)
    before = op.ledger.live
    backward([(total, op.new(8, PART))])
    # The incoming gradient, one of each use: the second is added into the first.
    assert op.ledger.peaks()[""].num_bytes == before + 8 + 8 + 8
    assert [grad.size for grad in capture.close() if grad is not None] == [8]


def test_nothing_is_recorded_without_gradients() -> None:
    op = _operators()
    capture = Capture([])
    source = capture.input(op.new(8, PART))
    with op.no_grad():
        assert op.silu(source, PART).node is None


def _gathered(zero: Zero3, ledger: Ledger, modules: Sequence[Module]) -> list[int]:
    """Bytes alive while each module runs, forward and then backward."""
    found = []
    zero.start_step()
    for module in [*modules, *reversed(modules)]:
        zero.fetch(module)
        found.append(ledger.live)
        zero.release(module)
    return found


def test_the_second_step_fetches_ahead_and_keeps_what_comes_again_soon() -> None:
    ledger = Ledger()
    settings = ZeroSettings(world=2, width=2, prefetch=100, persistence=0, max_reuse=150)
    zero = Zero3(ledger, settings)
    modules = [Module(str(index), [Param(str(index), 100)]) for index in range(4)]
    first = _gathered(zero, ledger, modules)
    assert first == [200] * 8, "what is not known is gathered when it is needed, and let go"
    second = _gathered(zero, ledger, modules)
    # The next one is on its way; around the turn the last ones stay, as they come again within 150 elements.
    assert second[0] == 400 and max(second) > 400
    zero.end_backward()
    assert ledger.live == 0


def test_several_parameters_travel_in_a_buffer_beside_their_copies() -> None:
    ledger = Ledger()
    zero = Zero3(ledger, ZeroSettings(world=2, width=2))
    zero.start_step()
    pair = Module("pair", [Param("a", 10), Param("b", 30)])
    zero.fetch(pair)
    assert ledger.highest[INDEX["gathered layers"]] == 2 * 40 + 2 * 40
    assert ledger.live == 2 * 40, "the buffer goes when the last has been asked for"


def test_gradients_beyond_the_bucket_are_reduced_in_fp32() -> None:
    op = _operators(bucket=100)
    small, large = Param("small", 60), Param("large", 500)
    op.zero.take_grad(small, op.new(120, PART))
    op.zero.take_grad(large, op.new(1000, PART))
    assert op.zero.reduced_bytes == 240, "the bucket is emptied before what does not fit into it"
    assert large.grad is not None
    op.zero.reduce()
    assert op.zero.reduced_bytes == 240 + 2000 and large.grad is None
    assert op.ledger.highest[INDEX["buckets"]] >= 2000


def test_tiles_and_calls_are_those_of_the_lean_layer() -> None:
    assert tiles(100, 30) == [30, 30, 10] and tiles(90, 30) == [30, 30, 30] and tiles(20, 30) == [20]
    assert tiles(3000, 30) == [30] * 3, "those in the middle are like the second"
    work = resolve(configured("model=qwen3_8b", "data.seq_len=1048576", "parallel.sp=8"), 8).work
    assert head_calls(work, 0) == [(1, [1, 1, 1, 1])]
    assert head_calls(work, 3) == [(1, [3, 1])]
    short = resolve(configured("model=qwen3_8b", "data.seq_len=16384", "parallel.sp=2"), 2).work
    assert head_calls(short, 0) == [(2, [8]), (2, [8])]
    # 32 ranks and 8 key/value heads: each rank has one of them and one query head.
    spread = resolve(configured("model=llama3_8b", "data.seq_len=1048576", "parallel.sp=32"), 32).work
    assert (spread.kv_local, head_calls(spread, 0)) == (1, [(1, [1])]) and not spread.grouped


def test_a_captured_tensor_is_the_input_itself() -> None:
    op = _operators()
    given = op.new(8, PART)
    inside = Capture([]).input(given)
    assert isinstance(inside, T) and inside.store is given.store
