"""Whether the attention kernel that was asked for can run here. Another one is never taken in silence."""

from __future__ import annotations

import torch
from transformers.utils.import_utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_kernels_available,
)

from stack.errors import Fault

PLAIN_BACKENDS = ("sdpa", "flex_attention")
"""Kernels of torch itself; they know no soft cap and no sinks."""


def attention_faults(name: str, device: str, dtype: torch.dtype) -> list[Fault]:
    """Why `model.attention=name` cannot be used on `device` ("cpu" or "cuda"); empty if it can.

    To be asked on the machine that trains: it looks for the kernel's package and for the GPU.
    """
    fault = _backend_fault(name, device, dtype)
    return [] if fault is None else [Fault("model.attention", name, *fault)]


def _backend_fault(name: str, device: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """(what is expected, how to mend it), or None."""
    if name == "sdpa":
        return None
    if name == "flex_attention":
        if device == "cpu":
            return "a kernel with a backward on the CPU, which flex_attention has not", "model.attention=sdpa"
        return None
    is_hub_kernel = "/" in name
    if name not in ("flash_attention_2", "flash_attention_3") and not is_hub_kernel:
        want = "sdpa, flex_attention, flash_attention_2, flash_attention_3 or a hub kernel (kernels-community/...)"
        return want, "model.attention=sdpa runs everywhere"
    if device == "cpu" or not torch.cuda.is_available():
        return "a kernel that runs without a GPU, which flash kernels do not", "model.attention=sdpa"
    if dtype == torch.float32:
        return (
            "sdpa or flex_attention under engine.precision=fp32: flash kernels take 16-bit numbers only",
            "engine.precision=bf16",
        )
    missing = {
        "flash_attention_2": ("flash_attn", is_flash_attn_2_available),
        "flash_attention_3": ("flash_attn_interface", is_flash_attn_3_available),
    }
    package, available = missing.get(name, ("kernels", is_kernels_available))
    if not available():
        return f"a kernel that is installed: the package {package} is missing or does not fit", (
            f"install {package}, or model.attention=sdpa"
        )
    return None
