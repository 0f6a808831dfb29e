"""Under ZeRO-3 no rank ever holds the whole model: peak memory of loading, and equality with the file; and weights drawn
from the seed are the same for every stage and split."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from stack.config.schema import ModelConfig, RunConfig
from stack.models.build import build_model
from tests.parity.cases import ParityCase
from tests.parity.conftest import SHAPE
from tests.parity.rank_side import assemble, config_of, weights_of
from tests.parity.steps_side import topology_of
from tests.ranks import Case, run_cases, run_ranks

WORLD = 2


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


class Peak(threading.Thread):
    """Samples the process's memory every millisecond or so."""

    def __init__(self):
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = anonymous_bytes()
        self.ended = threading.Event()

    def run(self):
        while not self.ended.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def grown(self) -> int:
        self.ended.set()
        self.join()
        return self.peak_bytes - self.start_bytes


def build_only(small: str, large: str) -> tuple[int, int]:
    """Peak growth in bytes while the model is built and sharded, engine not yet there; and the process's own id."""
    import tests.parity.rank_side as rank_side

    topology = topology_of(1)
    assemble(
        config_of(ParityCase("dp2", 3, 1, "none", False, ""), small), topology
    ).close()  # warm: imports, pools
    found = []
    real = rank_side.build_engine

    def stop(*args, **kwargs):
        found.append(peak.grown())
        return real(*args, **kwargs)

    rank_side.build_engine = stop
    peak = Peak()
    peak.start()
    assemble(config_of(ParityCase("dp2", 3, 1, "none", False, ""), large), topology).close()
    return found[0], os.getpid()


def load_and_gather(folder: str, stage: int) -> dict[str, torch.Tensor]:
    engine = assemble(config_of(ParityCase("dp2", stage, 1, "none", False, ""), folder), topology_of(1))
    weights = weights_of(engine)
    engine.close()
    return weights


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    """192 MB in fp32, of which the largest tensor is 16 MB."""
    shape = dict(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8
    )
    config = AutoConfig.for_model(
        "qwen3", num_key_value_heads=4, head_dim=64, max_position_embeddings=64, **shape
    )
    folder = tmp_path_factory.mktemp("large")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="50MB")
    return str(folder)


def test_no_rank_holds_the_whole_model(folders, large):
    size = sum(file.stat().st_size for file in Path(large).glob("*.safetensors"))
    # Without it glibc keeps freed tensors for later use, up to 80 MiB here, and they would count as held.
    env = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    values = run_ranks(build_only, WORLD, folders[False], large, init=False, env=env)
    for grown, _ in values:
        print(
            f"model {size / 2**20:.0f} MiB, shard {size / WORLD / 2**20:.0f} MiB, peak growth {grown / 2**20:.0f} MiB"
        )
        assert size / WORLD * 0.9 < grown < size / WORLD + 60 * 2**20


@pytest.mark.parametrize("stage", [0, 3])
def test_loaded_weights_are_those_of_the_file(folders, stage):
    want = load_file(Path(folders[False]) / "model.safetensors")
    got = run_ranks(load_and_gather, WORLD, folders[False], stage, init=False)[0]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def draw_and_gather(cfg: RunConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    engine = assemble(cfg, topology_of(cfg.parallel.sp), dtype)
    weights = weights_of(engine)
    engine.close()
    return weights


def test_drawn_weights_are_the_same_for_every_stage_and_split():
    """With those of one process, which no rank takes part in."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    model = ModelConfig(
        init="scratch", architecture=dict(SHAPE, model_type="qwen3", tie_word_embeddings=True)
    )
    cases = {}
    for stage, layout, precision in (
        (0, "dp2", "fp32"),
        (3, "dp2", "fp32"),
        (3, "sp2", "fp32"),
        (3, "sp2", "bf16"),
    ):
        cfg = config_of(ParityCase(layout, stage, 1, "all", True, ""), "", precision)
        cases[f"{stage} {layout} {precision}"] = Case(
            draw_and_gather, (replace(cfg, model=model), dtypes[precision])
        )
    seed = RunConfig().seed
    for name, outcome in run_cases(WORLD, cases, init=False).items():
        want = dict(build_model(model, 15, dtypes[name.split()[-1]], seed).model.named_parameters())
        got = outcome.get()[0]
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want), name
