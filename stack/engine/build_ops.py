"""DeepSpeed compiles some of its operators at first use, for minutes and without a word. Here it happens before the engine
is built, once, with a message and a clear error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.accelerator import get_accelerator

from stack.dist.agree import on_main_slowly
from stack.dist.topology import Topology
from stack.errors import LaunchError

LIMIT_S = 1800.0
"""Longest compilation waited for. async_io took 3 min on two busy cores."""


def needed_ops(ds_config: dict[str, Any]) -> dict[str, str]:
    """Builder name -> setting that needs it, of the operators that these settings use and torch does not offer."""
    zero = ds_config["zero_optimization"]
    found = {}
    device = zero.get("offload_optimizer", {}).get("device", "none")
    if device == "nvme":
        found["AsyncIOBuilder"] = "engine.offload_optimizer=nvme"
    if device != "none" and ds_config.get("zero_force_ds_cpu_optimizer", True):
        found["CPUAdamBuilder"] = "engine.cpu_optimizer=deepspeed"
    return found


def build_ops(ds_config: dict[str, Any], topology: Topology, tell: Callable[[str], None]) -> None:
    """Compile on rank 0 what is needed and not there yet, while the others wait. Raises LaunchError.

    On further nodes without a shared home, DeepSpeed compiles for itself, at the engine's start.
    """
    for name, setting in needed_ops(ds_config).items():
        still = partial(_tell_still, tell, name)
        on_main_slowly(topology, partial(_build, name, setting, tell), still, limit_s=LIMIT_S)


def _tell_still(tell: Callable[[str], None], name: str, seconds: float) -> None:
    tell(f"still building {name} ({seconds:.0f} s)")


def _build(name: str, setting: str, tell: Callable[[str], None]) -> None:
    accelerator = get_accelerator()
    builder = accelerator.create_op_builder(name) if accelerator is not None else None
    needs = "Fix: install a C++ compiler, and for NVMe the headers of libaio (Debian: g++ and libaio-dev)"
    if builder is None or not builder.is_compatible(verbose=False):
        raise LaunchError(f"{setting} needs DeepSpeed's {name}, which cannot be built here. {needs}")
    tell(f"building DeepSpeed's {name} for {setting}: minutes at the first start, seconds later")
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError) as error:
        raise LaunchError(f"{setting}: building DeepSpeed's {name} failed: {error}. {needs}") from error
