"""The exported folder holds the trained model: loaded by transformers, without DeepSpeed, its logits are the engine's to the
last bit; positions are the same on every rank and in the folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from stack.config.schema import RopeConfig, RunConfig
from stack.models.safetensors_file import read_headers
from tests.parity import logits_side, reference
from tests.parity.cases import ParityCase
from tests.parity.logits_side import Seen
from tests.parity.rank_side import config_of
from tests.parity.reference import make_steps
from tests.ranks import Case, run_cases

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
YARN = RopeConfig(scaling="yarn", factor=4.0, original_length=8)
ROPE: dict[str, Any] = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=8, rope_theta=10000.0
)
"""The same for transformers."""


@dataclass(frozen=True)
class Run:
    layout: str
    stage: int
    levers: str
    tied: bool
    precision: str
    yarn: bool = False

    @property
    def name(self) -> str:
        tied, yarn = "tied" if self.tied else "untied", ", yarn" if self.yarn else ""
        return f"{self.layout}, zero{self.stage}, {self.levers}, {tied}, {self.precision}{yarn}"

    def config(self, folder: str) -> RunConfig:
        case = ParityCase(self.layout, self.stage, 1, self.levers, self.tied, "")
        cfg = config_of(case, folder, self.precision)
        # A product of three rows may round in another way than one of ninety, so one tile holds all rows here.
        memory = replace(cfg.memory, mlp_tile=128)
        rope = YARN if self.yarn else cfg.model.rope
        return replace(cfg, memory=memory, model=replace(cfg.model, rope=rope))


RUNS = [
    Run("sp2", 3, "all", False, "fp32"),
    Run("sp2", 3, "all", True, "fp32"),
    Run("sp2", 3, "lean", False, "bf16"),
    Run("sp2", 3, "lean", True, "bf16"),
    Run("dp2", 1, "none", True, "fp32"),
    Run("sp2", 3, "all", False, "fp32", yarn=True),
    Run("dp2", 3, "lean", False, "bf16", yarn=True),
]
each_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    return {run.name: tmp_path_factory.mktemp("exported") / "hf" for run in RUNS}


@pytest.fixture(scope="module")
def outcomes(folders, exported) -> dict[str, list[tuple[Seen, dict[str, torch.Tensor]]]]:
    rows = make_steps("one document")[0]
    cases = {}
    for run in RUNS:
        where, dtype = str(exported[run.name]), DTYPES[run.precision]
        args = (run.config(folders[run.tied]), make_steps("packed")[:3], where, rows, dtype)
        cases[run.name] = Case(logits_side.train_and_export, args)
    return {name: each.get() for name, each in run_cases(2, cases, init=False).items()}


@each_run
def test_logits_are_those_of_the_engine(run, outcomes, exported):
    model, info = cast(
        Any, AutoModelForCausalLM.from_pretrained(exported[run.name], output_loading_info=True)
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([row.documents[0] for row in make_steps("one document")[0]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    seen = outcomes[run.name][0][0].logits
    assert logits.dtype == seen.dtype == DTYPES[run.precision]
    assert torch.equal(logits, seen), f"largest difference {(logits - seen).abs().max().item():.1e}"


@each_run
def test_trained_weights_are_there_once_in_their_type(run, outcomes, exported, folders):
    headers = read_headers(exported[run.name])
    assert {entry.dtype for entry in headers.values()} == {DTYPES[run.precision]}
    assert ("lm_head.weight" in headers) is not run.tied
    assert json.loads((exported[run.name] / "config.json").read_text())["tie_word_embeddings"] is run.tied
    model, start = (
        AutoModelForCausalLM.from_pretrained(path) for path in (exported[run.name], folders[run.tied])
    )
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) is run.tied
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    # Matrices: in bf16 a norm's weight of 1 is too coarse for these steps.
    unmoved = [
        after.shape
        for after, before in pairs
        if after.ndim == 2 and torch.equal(after, before.to(after.dtype))
    ]
    assert not unmoved


@each_run
def test_positions_are_the_same_on_every_rank_and_in_the_folder(run, outcomes, exported, folders):
    plain = AutoModelForCausalLM.from_pretrained(
        folders[run.tied], **(dict(rope_parameters=ROPE) if run.yarn else {})
    )
    want = dict(plain.named_buffers())
    again = AutoModelForCausalLM.from_pretrained(exported[run.name])
    for buffers in [*(found for _, found in outcomes[run.name]), dict(again.named_buffers())]:
        assert buffers.keys() == want.keys()
        for name, buffer in buffers.items():
            assert buffer.dtype == torch.float32 and torch.equal(buffer, want[name]), name
    assert again.model.rotary_emb.attention_scaling == pytest.approx(1.13863 if run.yarn else 1.0, abs=1e-5)


def test_yarn_trains_as_in_transformers(outcomes, folders, tmp_path):
    """Against the plain loop on a folder whose own config is scaled; the loss is that of rows seen after three steps."""
    run = next(run for run in RUNS if run.yarn and run.precision == "fp32")
    model = AutoModelForCausalLM.from_pretrained(folders[run.tied], rope_parameters=ROPE)
    model.save_pretrained(tmp_path)
    judge = reference.load(str(tmp_path))
    steps = [*make_steps("packed")[:3], make_steps("one document")[0]]
    want = reference.train(judge, steps, [0.1] * 4).losses
    unscaled = reference.train(reference.load(folders[run.tied]), steps, [0.1] * 4).losses
    seen = outcomes[run.name][0][0]
    targets = sum(len(row.documents[0]) - 1 for row in steps[-1])
    assert seen.loss / targets == pytest.approx(want[-1], rel=2e-6)
    assert abs(unscaled[-1] - want[-1]) > 1e-3, "a model without scaling would be told"
