"""Whole runs on two ranks: what they leave behind, restarts after crashes, and the same numbers on one rank.

Four runs over the same text. A goes straight through; its W&B is broken. B is killed twice, in steps 5 and 8, and
started again. C goes straight through on one rank. All have a NaN loss in step 2. D goes on from B's step 6 on one rank.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launchers import Ended, launch
from tests.wandb_files import offline_runs

pytestmark = pytest.mark.timeout(900)  # seven starts, which the first test waits for

SCRIPT = str(Path(__file__).parent / "train_with_faults.py")
STEPS = 9
OVERRIDES = [
    "+exp=tiny_cpu",
    "data=text",
    "data.path=texts",  # seen from the folder the command is started in
    "data.train_tokenizer=true",
    "data.vocab_size=300",
    "model.architecture.vocab_size=300",
    "data.seq_len=131",  # two ranks do not divide it
    "data.eval_fraction=0.3",
    "engine.accumulation=2",
    f"schedule.steps={STEPS}",
    "schedule.warmup_steps=2",
    "checkpoint.every=3",
    "checkpoint.keep=0",
    "log.eval_rows=3",
    "log.eval_every=4",
    "log.wandb=offline",
    "site.peak_tflops=1",
]
BROKEN_WANDB = 'def init(**settings):\n    raise RuntimeError("no W&B today")\ndef Settings(**settings):\n    return None\n'


class Runs:
    """The folder of the three runs and the ends of their starts."""

    def __init__(self, folder: Path):
        self.folder, self.ends = folder, {}

    def start(self, key: str, launcher: str, name: str, faults: str, *more: str, **env: str) -> Ended:
        sp = "parallel.sp=1" if launcher == "plain" else "parallel.sp=2"
        arguments = [SCRIPT, *OVERRIDES, f"name={name}", sp, *more]
        self.ends[key] = launch(launcher, arguments, cwd=self.folder, timeout_s=240, FAULTS=faults, **env)
        return self.ends[key]

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def journal(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path(name) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    write_texts(folder / "texts")
    (folder / "broken").mkdir()
    (folder / "broken" / "wandb.py").write_text(BROKEN_WANDB)
    runs = Runs(folder)
    root = str(Path(__file__).parents[2])
    runs.start("a", "deepspeed", "a", "nan:2", PYTHONPATH=f"{folder / 'broken'}:{root}")
    runs.start("b killed in step 5", "deepspeed", "b", "nan:2,die:5")
    runs.start("b killed in step 8", "deepspeed", "b", "nan:2,die:8")
    runs.start("b finished", "deepspeed", "b", "nan:2")
    runs.start("c", "plain", "c", "nan:2")
    begin = "checkpoint.resume=runs/b/checkpoints/step_000006"
    runs.start("d on one rank from b", "plain", "d", "", begin)
    runs.start("b on other rows", "plain", "b", "", "engine.accumulation=4")
    return runs


def write_texts(folder: Path) -> None:
    """Forty documents of words in which each letter helps to guess the next, from 20 to 400 letters long."""
    folder.mkdir()
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(40)]
    for number in range(40):
        text = " ".join(draw.choices(words, k=draw.randint(5, 80)))
        (folder / f"{number:02d}.txt").write_text(text)


def numbers(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what depends on the machine's speed and memory."""
    return {
        key: value for key, value in record.items() if not key.endswith(("_s", "_gib", "fu", "_per_rank"))
    }


def test_runs_end_well_and_killed_ones_do_not(runs: Runs) -> None:
    for key in ("a", "b finished", "c"):
        assert runs.ends[key].codes == [0], runs.ends[key].output
    for key in ("b killed in step 5", "b killed in step 8"):
        assert runs.ends[key].codes != [0], runs.ends[key].output


def test_run_folder_holds_everything_once(runs: Runs) -> None:
    for name in "abc":
        files = {path.name for path in runs.path(name).iterdir()}
        assert {"config.yaml", "metrics.jsonl", "curve.png", "hf", "checkpoints"} <= files
        assert yaml.safe_load((runs.path(name) / "config.yaml").read_text())["name"] == name
        ranks = range(1 if name == "c" else 2)
        for step in (3, 6, 9):
            saved = {path.name for path in (runs.path(name) / "checkpoints" / f"step_{step:06d}").iterdir()}
            for rank in ranks:
                assert {f"rng_rank_{rank:05d}.pt", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"} <= saved
            assert "manifest.json" in saved
    assert {path.name for path in (runs.folder / "runs").iterdir()} == {"a", "b", "c", "d"}
    assert (runs.path("a") / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_journal_holds_each_step_once_with_all_numbers(runs: Runs) -> None:
    for name in "abc":
        records = runs.journal(name)
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        assert all(record["forward_backward_s"] > 0 and record["host_rss_gib"] > 0 for record in records)
        assert all(0 < record["mfu"] < record["hfu"] < 1 for record in records)
        assert [record["step"] for record in records if "eval_loss" in record] == [4, 8, 9]
        world = 1 if name == "c" else 2
        for record in records:
            assert record["tokens_per_s"] == pytest.approx(world * record["tokens_per_s_per_rank"])
            assert record["targets"] < record["tokens"] <= 2 * 131


def test_restarted_run_equals_the_straight_one_bit_for_bit(runs: Runs) -> None:
    straight, restarted = runs.journal("a"), runs.journal("b")
    for one, other in zip(straight, restarted, strict=True):
        assert numbers(one) == numbers(other)
    weights = [(runs.path(name) / "hf" / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    assert "resuming from step 3" in runs.ends["b killed in step 8"].output
    assert "resuming from step 6" in runs.ends["b finished"].output


def test_one_rank_gives_the_same_numbers_as_two(runs: Runs) -> None:
    for one, two in zip(runs.journal("c"), runs.journal("a"), strict=True):
        for key in (
            "step",
            "lr",
            "rows",
            "tokens",
            "targets",
            "tokens_total",
            "targets_total",
            "skipped_steps",
        ):
            assert one[key] == two[key], key
        for key in ("loss", "grad_norm", "eval_loss", "eval_perplexity"):
            if one.get(key) is None:
                assert two.get(key) is None
            else:
                assert one[key] == pytest.approx(two[key], rel=2e-5), (one["step"], key)


def test_nan_step_is_skipped_counted_and_named(runs: Runs) -> None:
    record = runs.journal("a")[1]
    assert record["skipped"] == "nonfinite loss on rank 1"
    assert (record["loss"], record["grad_norm"], record["skipped_steps"]) == (None, None, 1)
    assert runs.journal("a")[-1]["skipped_steps"] == 1
    assert "step 2: skipped (nonfinite loss on rank 1)" in runs.ends["a"].output
    losses = [record["loss"] for record in runs.journal("a") if record["loss"]]
    assert losses[-1] < losses[0]


def test_learning_rate_is_that_of_the_schedule_over_all_restarts(runs: Runs) -> None:
    from stack.config.schema import ScheduleConfig
    from stack.engine.schedule import lr_factor

    factor = lr_factor(ScheduleConfig(name="cosine", steps=STEPS, warmup_steps=2), STEPS)
    expected = [1e-3 * factor(step) for step in range(STEPS)]
    for name in "abc":
        assert [record["lr"] for record in runs.journal(name)] == pytest.approx(expected)


def test_wandb_is_one_run_with_each_step_once_over_all_restarts(runs: Runs) -> None:
    found = offline_runs(runs.path("b"))
    assert len(found) == 1  # from rank 0 alone; what the killed starts left was incomplete and is replaced
    rows = [row for _, history in found for row in history]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, record in zip(rows, runs.journal("b"), strict=True):
        for key in ("loss", "grad_norm", "lr", "eval_loss", "tokens_total"):
            assert row.get(key) == record.get(key)


def test_broken_wandb_is_a_warning(runs: Runs) -> None:
    assert runs.ends["a"].output.count("no W&B today") == 1
    assert not (runs.path("a") / "wandb").exists()


def test_console_shows_progress_and_says_where_everything_is(runs: Runs) -> None:
    for key in ("a", "b finished", "c"):
        output = runs.ends[key].output
        assert output.count(f"step {STEPS}/{STEPS} | loss") == 1
        assert "The run is complete." in output
        assert str(runs.path(key[0]) / "hf") in output and str(runs.path(key[0]) / "curve.png") in output
        assert "Warning" not in output, output
        assert output.count("warning") == (key == "a"), output  # the broken W&B


def test_exported_model_loads_and_gives_the_evaluated_loss_of_its_own_tokenizer(runs: Runs) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(runs.path("a") / "hf", output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokenizer = AutoTokenizer.from_pretrained(runs.path("a") / "hf")
    ids = tokenizer((runs.folder / "texts" / "00.txt").read_text(), return_tensors="pt").input_ids
    loss = float(model(ids, labels=ids).loss.detach())
    assert loss == pytest.approx(runs.journal("a")[-1]["eval_loss"], rel=0.2)


def test_checkpoint_of_two_ranks_goes_on_on_one(runs: Runs) -> None:
    ended = runs.ends["d on one rank from b"]
    assert ended.codes == [0], ended.output
    saved = "saved on 2 rank(s), SP 2, ZeRO-3, fp32, states on cpu, now on 1 rank(s)"
    assert f"reading step_000006 parameter by parameter: {saved}" in ended.output
    for one, two in zip(runs.journal("d"), runs.journal("a")[6:], strict=True):
        assert [one[key] for key in ("step", "lr", "tokens_total")] == [
            two[key] for key in ("step", "lr", "tokens_total")
        ]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)


def test_other_rows_a_step_are_refused_with_the_way_out(runs: Runs) -> None:
    ended = runs.ends["b on other rows"]
    assert ended.codes == [1]
    assert "Traceback" not in ended.output
    assert "rows_per_step: saved 2, now 4" in ended.output and "engine.accumulation=2 keeps 2" in ended.output
    assert len(runs.journal("b")) == STEPS
