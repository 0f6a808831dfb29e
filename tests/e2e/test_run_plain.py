"""Whole runs in this process, on one rank: stages, epochs, divergence, and what is refused before the first step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from stack.config.compose import compose_config
from stack.config.schema import RunConfig
from stack.dist.topology import Topology
from stack.errors import CheckpointError, LaunchError, NonFiniteError
from stack.train.run import run

TINY = [
    "+exp=tiny_cpu",
    "data.seq_len=64",
    "memory.loss_tile=16",
    "memory.mlp_tile=16",
    "checkpoint.export=false",
]


@pytest.fixture(scope="module", autouse=True)
def one_process_group() -> Iterator[None]:
    """DeepSpeed keeps the groups of its first engine for the whole process, so all runs share them."""
    with mock.patch.object(Topology, "close"):
        yield
    if dist.is_initialized():
        from deepspeed.utils import groups

        dist.destroy_process_group()
        groups._WORLD_GROUP = None  # for the next file of this kind


@pytest.fixture(autouse=True)
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*overrides: str) -> list[dict[str, Any]]:
    """Runs, and returns the journal."""
    cfg: RunConfig = compose_config([*TINY, *overrides])
    with mock.patch.dict(os.environ):  # a run sets the variables of its rank
        run(cfg)
    return journal(cfg.name)


def journal(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_resumed_run_equals_the_straight_one_at_every_stage(stage: int, precision: str) -> None:
    engine = [f"engine=zero{stage}", f"engine.precision={precision}"]
    straight = train("name=a", *engine, "checkpoint.every=2", "schedule.steps=4")
    resumed = train("name=b", *engine, "schedule.steps=4", "checkpoint.resume=runs/a/checkpoints/step_000002")
    assert [record["step"] for record in resumed] == [3, 4]
    for key in ("loss", "grad_norm", "lr", "tokens_total"):
        assert [record[key] for record in resumed] == [record[key] for record in straight[2:]]


def test_epoch_ends_with_a_smaller_step_and_reads_every_token_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("texts").mkdir()
    for number in range(7):
        Path("texts", f"{number}.txt").write_text("ab cd ef gh " * (number + 1))
    text = ["data=text", "data.path=texts", "data.train_tokenizer=true", "data.vocab_size=262"]
    text += ["model.architecture.vocab_size=262", "data.eval_fraction=0", "data.packing=document"]
    records = train("name=a", *text, "schedule.steps=null", "schedule.epochs=2", "engine.accumulation=4")
    store = json.loads(next(Path("data").glob("text-*/store.json")).read_text())
    rows = [record["rows"] for record in records]
    assert len(rows) == 4 and rows[0] == rows[2] == 4 and 0 < rows[1] == rows[3] < 4
    assert records[1]["tokens_total"] == store["num_tokens"]
    assert records[3]["tokens_total"] == 2 * store["num_tokens"]
    assert records[3]["targets_total"] == 2 * (store["num_tokens"] - store["num_documents"])
    assert records[3]["small_steps"] == 2
    output = capfd.readouterr().out
    assert output.count("smaller step") == 2 and "2 of an incomplete last window" in output


def test_diverging_run_stops_with_the_step_and_the_place() -> None:
    limits = [
        "optim=sgd",
        "optim.lr=1e38",
        "optim.clip=0",
        "engine.max_nonfinite_steps=2",
        "schedule.steps=20",
    ]
    with pytest.raises(NonFiniteError, match=r"nonfinite .* 3 such step\(s\) in a row.*optim\.lr"):
        train("name=a", *limits)
    records = journal("a")
    assert len(records) < 20
    assert [record["skipped"] is None for record in records[-4:]] == [True, False, False, False]


def test_longer_run_goes_on_and_says_that_the_rate_changes_its_course(
    capfd: pytest.CaptureFixture[str],
) -> None:
    train("name=a", "schedule.steps=2")
    records = train("name=a", "schedule.steps=4")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert "planned for 2 steps and is for 4 now" in capfd.readouterr().out
    assert records == train("name=a", "schedule.steps=4")  # a third start finds nothing to do
    output = capfd.readouterr().out
    assert "all 4 steps are done already" in output and "settings that differ" not in output
    train("name=b", "schedule.steps=1", "checkpoint.resume=runs/a/checkpoints/step_000002")


def test_going_back_within_the_run_sets_newer_checkpoints_aside() -> None:
    first = train("name=a", "schedule.steps=4", "checkpoint.every=2")
    again = train("name=a", "schedule.steps=4", "checkpoint.resume=runs/a/checkpoints/step_000002")
    assert [record["loss"] for record in first] == [record["loss"] for record in again]
    folders = sorted(path.name for path in Path("runs/a/checkpoints").glob("step_*"))
    assert folders == ["step_000002", "step_000004", "step_000004.abandoned"]


def test_evaluation_changes_nothing_in_training() -> None:
    data = ["data.eval_fraction=0.3", "schedule.steps=3", "checkpoint=none"]
    with_it = train("name=a", *data, "log.eval_rows=5", "log.eval_every=1")
    without = train("name=b", *data, "log.eval_rows=0")
    assert all(record["eval_targets"] == 5 * 63 for record in with_it)
    for key in ("loss", "grad_norm", "tokens_total"):
        assert [record[key] for record in with_it] == [record[key] for record in without]
    assert not any("eval_loss" in record for record in without)


def test_run_without_checkpoints_and_export_leaves_only_its_numbers() -> None:
    train("name=a", "checkpoint=none", "schedule.steps=1")
    assert {path.name for path in Path("runs/a").iterdir()} == {
        "config.yaml",
        "lock",
        "metrics.jsonl",
        "curve.png",
    }


WIDER = ["model.architecture.hidden_size=64", "checkpoint.force=[model]"]


@pytest.mark.parametrize(
    "overrides, error, text",
    [
        (["checkpoint.resume=empty"], CheckpointError, "empty has no manifest.json"),
        (["checkpoint.resume=none"], CheckpointError, "resume=none"),
        (["checkpoint.resume=2"], CheckpointError, "no checkpoint folder .*step_000002.*step_000001"),
        (["engine.precision=bf16"], CheckpointError, "engine.precision: saved 'fp32', now 'bf16'"),
        (["engine.accumulation=2"], CheckpointError, "rows_per_step: saved 1, now 2.*engine.accumulation=1"),
        (["model.architecture.hidden_size=64"], CheckpointError, "hidden_size: saved 32, now 64"),
        (WIDER, CheckpointError, "holds another model: saved"),
        (["data.seq_len=32"], CheckpointError, "data.seq_len: saved 64, now 32"),
        (["out=file"], LaunchError, "set `out`"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(
    overrides: list[str], error: type[Exception], text: str
) -> None:
    train("name=a", "schedule.steps=1")
    Path("file").write_text("")
    Path("empty").mkdir()
    before, config = journal("a"), Path("runs/a/config.yaml").read_text()
    with pytest.raises(error, match=text):
        train("name=a", "schedule.steps=3", *overrides)
    assert journal("a") == before
    assert Path("runs/a/config.yaml").read_text() == config
