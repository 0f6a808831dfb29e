"""One run under every launcher: the same losses, overrides in their order; and a start that cannot work ends soon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.launchers import LAUNCHERS, ROOT, launch, start

TRAIN = str(ROOT / "launch" / "train.py")
# Later overrides win: were their order lost, the rate would be ten times the one that is expected.
OVERRIDES = ["+exp=tiny_cpu", "optim.lr=1e-2", "optim.lr=1e-3", "checkpoint=none", "schedule.steps=3"]
LIMIT_S = 240


def losses(folder: Path) -> list[float]:
    lines = folder.joinpath("metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if "grad_norm" in record]


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """One process: what the others are held to."""
    folder = tmp_path_factory.mktemp("plain")
    ended = launch("plain", [TRAIN, *OVERRIDES], folder, LIMIT_S)
    assert ended.codes == [0], ended.output
    found = losses(folder / "runs" / "tiny_cpu")
    assert len(found) == 3 and found[0] != found[2]
    return found


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "plain"])
def test_same_run_under_every_launcher(launcher: str, plain_losses: list[float], tmp_path: Path) -> None:
    ended = launch(launcher, [TRAIN, *OVERRIDES, "parallel.sp=2"], tmp_path, LIMIT_S)
    assert set(ended.codes) == {0}, ended.output
    folder = tmp_path / "runs" / "tiny_cpu"
    assert losses(folder) == pytest.approx(plain_losses, abs=1e-5)
    assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["lr"] == 1e-3
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny_cpu"], "one folder for all ranks"
    assert ended.output.count("step 3/3") == 1, "one rank reports"


def test_two_jobs_at_once_in_one_folder(tmp_path: Path) -> None:
    """They share the place and the second they start in; each has its own name."""
    commands = [
        [TRAIN, *OVERRIDES, "parallel.sp=2", "schedule.steps=1", f"name={name}"] for name in ("one", "two")
    ]
    with (
        start("deepspeed", commands[0], tmp_path) as first,
        start("deepspeed", commands[1], tmp_path) as second,
    ):
        for job in (first, second):
            ended = job.wait(LIMIT_S)
            assert ended.codes == [0], ended.output
    assert losses(tmp_path / "runs" / "one") == losses(tmp_path / "runs" / "two") != []


@pytest.mark.parametrize(
    ("launcher", "ranks"), [("deepspeed", 2), ("torchrun", 2), ("srun", 2), ("plain", 1)]
)
def test_too_few_ranks_for_the_million_token_run(launcher: str, ranks: int, tmp_path: Path) -> None:
    ended = launch(launcher, [TRAIN, "+exp=qwen3_1m"], tmp_path, timeout_s=180)
    assert all(ended.codes), ended.output
    assert ended.output.count("parallel.sp=8: expected a divisor of the") == 1
    assert f"{ranks} rank(s) started" in ended.output and "deepspeed --num_gpus 8" in ended.output
    own_part = ended.output.partition("torch/distributed/elastic")[0]  # torchrun adds a traceback of its own
    assert "Traceback" not in own_part
    assert not any(tmp_path.iterdir()), "nothing is written before the settings are right"
