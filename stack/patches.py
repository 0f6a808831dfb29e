"""Every change to DeepSpeed or transformers at run time, in one list. Each gives its reason, the place upstream, and the
versions it was written for; its test in `tests/unit/test_patches.py` fails once upstream no longer needs it.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Patch:
    """One change to a package."""

    name: str
    package: str
    versions: str
    """The versions of the package that the change was tried with; outside them it is left out, with a warning."""
    reason: str
    link: str
    apply: Callable[[], None]


def _no_shm_comm() -> None:
    # deepspeed.comm has an attribute `torch` that is PyTorch itself, so `import ... as` would give the wrong module.
    backend = importlib.import_module("deepspeed.comm.torch")
    setattr(backend, "build_shm_op", _build_no_shm_op)  # noqa: B010  a plain assignment does not type-check


def _build_no_shm_op() -> None:
    return None


def _plain_muon() -> None:
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


PATCHES = (
    Patch(
        name="no-shm-comm",
        package="deepspeed",
        versions=">=0.19,<0.20",
        reason=(
            "On CPU ranks init_distributed compiles deepspeed_shm_comm: minutes at the first start, under a lock that a "
            "killed run leaves behind and that every later run waits for. Only inference_all_reduce uses it."
        ),
        link="https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/comm/torch.py (build_shm_op)",
        apply=_no_shm_comm,
    ),
    Patch(
        name="plain-muon",
        package="deepspeed",
        versions=">=0.19,<0.20",
        reason=(
            "To check the optimizer's class DeepSpeed imports Muon's kernels, which ask torch.compile as they are defined; "
            "that imports all of torch's compiler, 540 modules and 2 to 7 s of every rank's start. Nobody uses Muon here."
        ),
        link="https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/utils.py (is_zero_supported_optimizer)",
        apply=_plain_muon,
    ),
)


def apply_patches() -> None:
    """Applies every patch; to be called before the first use of DeepSpeed. Calling it again changes nothing."""
    for patch in PATCHES:
        found = version(patch.package)
        if SpecifierSet(patch.versions).contains(found, prereleases=True):
            patch.apply()
        else:
            warnings.warn(
                f"patch {patch.name} left out: written for {patch.package}{patch.versions}, found {found}",
                stacklevel=2,
            )
