"""Copies of states in host memory: equal, independent, as large in a file, and in the same buffers each time."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from stack.engine.capture import HostCopies, tensor_bytes, tensors_in


def states() -> dict[str, Any]:
    flat = torch.arange(12.0)
    named = torch.ones(3, requires_grad=True)
    named.ds_name = "master"  # type: ignore[attr-defined]
    module = OrderedDict(a=flat[:4].view(2, 2), b=flat[4:], again=flat[:4], empty=torch.empty(0))
    module._metadata = {"version": 1}  # type: ignore[attr-defined]
    return {
        "module": module,
        "optimizer": [{"step": torch.tensor(3.0), "half": torch.ones(5, dtype=torch.bfloat16)}, named],
        "parameter": nn.Parameter(torch.zeros(2, 3).t()),
        "scaler": Scaler(),
        "settings": ({"lr": 0.1}, None, torch.Size([2])),
    }


class Scaler:
    """An object of DeepSpeed's that goes into the file, and changes with each step."""

    def __init__(self) -> None:
        self.scale, self.history = 2.0, [1]


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_copy_saves_as_the_original_does_and_is_not_touched_by_later_steps() -> None:
    original = states()
    # The id of a file is drawn from its records: all bytes are equal only if all contents are.
    expected = saved(original)
    copied = HostCopies().copy(original)
    for tensor in tensors_in(original):
        tensor.data.add_(1)
    original["scaler"].history.append(2)
    original["settings"][0]["lr"] = 0.2
    assert saved(copied) == expected
    assert saved(original) != expected


def test_what_shares_memory_shares_it_in_the_copy() -> None:
    copied = HostCopies().copy(states())
    module = copied["module"]
    assert module["a"].data_ptr() == module["again"].data_ptr() == module["b"].data_ptr() - 16
    assert tensor_bytes(copied) == tensor_bytes(states()) == 12 * 4 + 4 + 10 + 12 + 24
    assert len({tensor.data_ptr() for tensor in tensors_in(copied)}) == 7


def test_buffers_are_used_again_and_replaced_where_sizes_change() -> None:
    copies = HostCopies()

    def addresses(value: Any) -> list[int]:
        copies.restart()
        return [tensor.data_ptr() for tensor in tensors_in(copies.copy(value))]

    first = addresses(states())
    assert addresses(states()) == first
    large = states() | {"parameter": nn.Parameter(torch.zeros(7))}
    assert addresses(large)[-1] != first[-1]
    copies.restart()
    one = copies.copy(torch.ones(4))
    two = copies.copy(torch.zeros(4))
    assert one.data_ptr() != two.data_ptr(), "copies of one save do not overlap"
