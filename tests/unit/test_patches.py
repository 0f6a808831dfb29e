"""Each patch is still needed, and works. A failure of `..._is_needed` means: upstream mended it, remove the patch."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
from packaging.specifiers import SpecifierSet

from stack import patches
from tests.ranks import Case, run_cases


def shm_op_is_loaded(patched: bool) -> bool:
    """Whether DeepSpeed, starting on CPU ranks, asks its builder for the op. Nothing is compiled here."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    assert accelerator is not None
    builder = accelerator.get_op_builder("ShareMemCommBuilder")
    deepspeed.ops.__compatible_ops__[builder.NAME] = True  # as on any machine with a compiler
    with mock.patch.object(builder, "load") as load:
        if patched:
            patches.apply_patches()
            patches.apply_patches()
        deepspeed.init_distributed("gloo", verbose=False)
    deepspeed.comm.comm.cdb = None
    return load.called


def test_shm_comm_is_needed_and_switched_off() -> None:
    outcomes = run_cases(
        1, {"needed": Case(shm_op_is_loaded, (False,)), "off": Case(shm_op_is_loaded, (True,))}
    )
    assert outcomes["needed"].get() == [True]
    assert outcomes["off"].get() == [False]


@pytest.mark.parametrize(("patched", "loaded"), [(False, True), (True, False)], ids=["is needed", "works"])
def test_muon_brings_the_compiler(patched: bool, loaded: bool) -> None:
    apply = "from stack.patches import apply_patches; apply_patches(); apply_patches()\n" * patched
    code = f"import sys\n{apply}import deepspeed.runtime.zero.muon.muon_optimizer\n"
    code += "import os; assert 'TORCHDYNAMO_DISABLE' not in os.environ\n"
    code += "print('torch._inductor.compile_fx' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == str(loaded)


def test_every_patch_says_why_and_for_which_versions() -> None:
    names = [patch.name for patch in patches.PATCHES]
    assert len(set(names)) == len(names)
    for patch in patches.PATCHES:
        assert patch.reason and patch.link.startswith("https://github.com/")
        SpecifierSet(patch.versions)


def test_another_version_is_left_alone_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    patch = patches.Patch("p", "deepspeed", ">=99", "r", "https://github.com/", lambda: applied.append("p"))
    monkeypatch.setattr(patches, "PATCHES", (patch,))
    with pytest.warns(UserWarning, match="patch p left out"):
        patches.apply_patches()
    assert not applied
