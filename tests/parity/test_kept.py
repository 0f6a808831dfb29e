"""Lean layers train alike wherever their activations are kept, and with fused norms: two ranks, ZeRO-3, SP=2,
micro-batches of different lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stack.config.schema import MemoryConfig
from stack.ops.spill_file import PAGE
from tests.parity.conftest import SHAPE
from tests.parity.kept_side import Kept, run_all
from tests.ranks import run_ranks

LEAN = MemoryConfig(lean=True, mlp_tile=3, tiled_loss=True, loss_tile=4, fused_kernels="none")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kept]:
    torch.manual_seed(5)
    config = AutoConfig.for_model("qwen3", **SHAPE | dict(num_hidden_layers=5))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    folder, disk = str(tmp_path_factory.mktemp("model")), str(tmp_path_factory.mktemp("disk"))
    model.save_pretrained(folder)
    host = replace(LEAN, offload=True)
    memories = {
        "device": LEAN,
        "host": host,
        # A layer of 16 tokens takes two pages; there is room for three of the five.
        "file": replace(host, spill_folder=disk, host_gib=6 * PAGE / 2**30),
        "fused": replace(host, fused_kernels="torch"),
    }
    return run_ranks(run_all, 2, folder, memories, "fp32", init=False)[0]


@pytest.mark.parametrize("where", ["host", "file"])
def test_bits_are_equal_wherever_activations_are_kept(outcomes: dict[str, Kept], where: str) -> None:
    got, want = outcomes[where], outcomes["device"]
    assert got.losses == want.losses and got.norms == want.norms
    assert len(want.weights) > 50 and want.spilled == 0
    # In each of five micro-batches the two layers too many, and one more to make room for a next.
    assert got.spilled == (5 * 3 if where == "file" else 0)
    for name, weight in want.weights.items():
        assert torch.equal(got.weights[name], weight), name


def test_fused_norms_train_alike(outcomes: dict[str, Kept]) -> None:
    got, want = outcomes["fused"], outcomes["device"]
    # The final norm runs in tiles, so it has a forward of its own in both.
    assert (got.own_norms, want.own_norms) == (4 * 5 + 1, 1)
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    assert got.norms == pytest.approx(want.norms, rel=1e-5)
    for name, weight in want.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)
