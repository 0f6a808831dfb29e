"""A device that is not there: torch takes its tensors for those of an accelerator, so that device and host memory are told
apart on a machine that has only the latter.

It is torch's Python-only PrivateUse1 backend, of torch 2.13: a private interface, which `tests/parity/test_exact.py`
holds to what is needed here. Tensors on it exist only inside FakeTensorMode: no kernel ever runs. It is registered for the
whole process and cannot be taken back.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

VIRTUAL = "virtual"
"""Its type, as in `torch.device(VIRTUAL, 0)`."""

ATOMIC = ("silu_backward", "mish_backward")
"""Operators that have a kernel on every real device and a composite one for all others, into which torch would take them
apart before anybody sees them: five tensors of full width for one."""

_library: list[torch.library.Library] = []


class _Module:
    """What torch asks of `torch.virtual`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device(self, index: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def register_virtual_device() -> torch.device:
    """Once a process; later calls only return the device."""
    device = f"{VIRTUAL}:0"
    if _library:
        return torch.device(device)
    _setup_privateuseone_for_python_backend(rename=VIRTUAL, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    for name in ATOMIC:
        library.impl(name, _never_run, "PrivateUse1")
    _library.append(library)
    # Tensors made with numbers, as by torch.tensor(..., device=...), must not touch the device either.
    setattr(FakeTensorMode, "avoid_device_init", property(lambda mode: True))  # noqa: B010  as in stack/patches.py
    return torch.device(device)


def _never_run(*args: Any) -> None:
    raise RuntimeError("a tensor of the virtual device met a kernel: it was made outside FakeTensorMode")


def register_fake_ranks() -> str:
    """The name of a process group backend that answers for all ranks at once, on the CPU and the virtual device."""
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg

    name = "alone"
    if name not in dist.Backend.backend_list:
        devices = ["cpu", VIRTUAL] if _library else ["cpu"]
        dist.Backend.register_backend(name, _create_fake_pg, extended_api=True, devices=devices)
    return name
