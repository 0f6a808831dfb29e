"""Which operators are compiled before the engine starts, and what is said where they cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stack.config.compose import compose_config
from stack.dist.topology import Topology
from stack.engine import build_ops
from stack.engine.ds_config import build_ds_config
from stack.errors import LaunchError

ALONE = Topology(0, 1, 1, 1, 0, 0, torch.device("cpu"), None, None)
NVME = ["engine.offload_optimizer=nvme", "engine.nvme_path=/tmp"]


def settings(*overrides: str) -> dict[str, Any]:
    return build_ds_config(compose_config(["+exp=tiny_cpu", *overrides]), 1)


class Builder:
    def __init__(self, compatible: bool = True, error: Exception | None = None):
        self.compatible, self.error, self.loaded = compatible, error, False

    def is_compatible(self, verbose: bool) -> bool:
        return self.compatible

    def load(self, verbose: bool) -> None:
        if self.error:
            raise self.error
        self.loaded = True


def use(monkeypatch: pytest.MonkeyPatch, builder: Builder) -> None:
    class Accelerator:
        def create_op_builder(self, name: str) -> Builder:
            return builder

    monkeypatch.setattr(build_ops, "get_accelerator", Accelerator)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], []),
        (["engine.offload_optimizer=cpu"], []),
        (["engine.offload_optimizer=cpu", "engine.cpu_optimizer=deepspeed"], ["CPUAdamBuilder"]),
        (NVME, ["AsyncIOBuilder"]),
    ],
)
def test_only_what_is_needed_is_built(overrides: list[str], names: list[str]) -> None:
    assert list(build_ops.needed_ops(settings(*overrides))) == names


def test_building_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    builder, said = Builder(), []
    use(monkeypatch, builder)
    build_ops.build_ops(settings(*NVME), ALONE, said.append)
    assert builder.loaded
    assert said == [
        "building DeepSpeed's AsyncIOBuilder for engine.offload_optimizer=nvme: minutes at the first start, seconds later"
    ]


@pytest.mark.parametrize("builder", [Builder(compatible=False), Builder(error=RuntimeError("no g++"))])
def test_what_cannot_be_built_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, builder: Builder) -> None:
    use(monkeypatch, builder)
    with pytest.raises(LaunchError, match=r"offload_optimizer=nvme.*libaio-dev"):
        build_ops.build_ops(settings(*NVME), ALONE, lambda text: None)
