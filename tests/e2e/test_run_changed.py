"""What becomes of a checkpoint besides going on as it was: other settings, a warm start, an export."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stack.checkpoint import export_run as module
from stack.checkpoint import zero_files
from stack.checkpoint.export_run import Request, export_run, read_arguments
from stack.checkpoint.manifest import read_manifest
from stack.checkpoint.zero_files import ZeroFiles
from stack.errors import CheckpointError, ConfigError, DataError, ModelError
from tests.e2e.test_run_plain import journal, one_process_group, start_folder, train

__all__ = ["one_process_group", "start_folder"]  # fixtures
STEP_2 = "runs/a/checkpoints/step_000002"


def write_texts(folder: str, word: str) -> None:
    Path(folder).mkdir()
    for number in range(9):
        Path(folder, f"{number}.txt").write_text(f"{word} cd ef gh " * (number + 3))


TEXT = [
    "data=text",
    "data.path=texts",
    "data.train_tokenizer=true",
    "data.vocab_size=262",
    "model.architecture.vocab_size=262",
    "data.eval_fraction=0",
]


def test_another_length_and_rate_say_what_the_learning_rate_does(capfd: pytest.CaptureFixture[str]) -> None:
    train("name=a", "schedule.steps=3", "checkpoint.every=2")
    capfd.readouterr()
    again = train(
        "name=a", "schedule.steps=8", "optim.lr=2e-3", "checkpoint.resume=2", "engine=zero1", "log.every=5"
    )
    output = capfd.readouterr().out
    for part in (
        "settings that differ from those of step_000002:",
        "- optim.lr: saved 0.001, now 0.002",
        "- schedule.steps: saved 3, now 8",
        "- log.every: saved 1, now 5",
        "planned for 3 steps and is for 8 now",
        f"learning rate: step 3 was to be taken with 0.00025 and is taken with {again[2]['lr']:.4g}",
        "ZeRO-3, fp32, states on cpu, now on 1 rank(s), SP 1, ZeRO-1, fp32, states on cpu",
    ):
        assert part in output, output
    assert "not what it was" not in output
    assert [record["step"] for record in again] == list(range(1, 9))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_another_stage_goes_on_as_the_saved_one(stage: int) -> None:
    straight = train("name=a", "schedule.steps=4", "checkpoint.every=2", "schedule.warmup_steps=3")
    plan = ["schedule.steps=4", "schedule.warmup_steps=3", f"checkpoint.resume={STEP_2}"]
    other = train("name=b", *plan, f"engine=zero{stage}")
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in other] == pytest.approx([line[key] for line in straight[2:]], rel=1e-5)
    # And back again, from what was saved under the other stage.
    back = train("name=c", *plan[:2], "checkpoint.resume=runs/b/checkpoints/step_000004", "schedule.steps=5")
    assert [line["step"] for line in back] == [5]


def test_spoiling_changes_pass_when_they_are_forced_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    write_texts("texts", "ab")
    write_texts("others", "xyz")
    first = train("name=a", *TEXT, "schedule.steps=2")
    change = ["data.path=others", "engine.precision=bf16", "optim=sgd", "schedule.steps=3"]
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.force=\[data\.path,engine\.precision,optim\.name\]"
    ):
        train("name=a", *TEXT, *change)
    names = "data.path,engine.precision,optim.name"
    # A tokenizer trained on other text would put the weights under other ids.
    with pytest.raises(
        CheckpointError, match=r"another tokenizer.*checkpoint\.force=\[data\.path,.*model\.tokenizer\]"
    ):
        train("name=a", *TEXT, *change, f"checkpoint.force=[{names}]")
    forced = f"checkpoint.force=[{names},model.tokenizer]"
    records = train("name=a", *TEXT, *change, forced)
    output = capfd.readouterr().out
    assert "the optimizer starts anew" in output and "read from its first row on" in output
    assert records[:2] == first and records[2]["tokens_total"] > records[1]["tokens_total"]
    assert [
        line["step"] for line in train("name=a", *TEXT, *change[1:], f"data.path={Path('others').resolve()}")
    ] == [1, 2, 3]
    Path("others", "0.txt").write_text("changed under the same path")
    with pytest.raises(DataError, match=r"belongs to other rows: content.*checkpoint\.force=\[data\.path\]"):
        train("name=a", *TEXT, *change, "schedule.steps=4")


def test_the_saved_tokenizer_is_kept_for_other_text_as_the_refusal_says() -> None:
    write_texts("texts", "ab")
    write_texts("others", "xyz")
    train("name=a", *TEXT, "schedule.steps=2")
    saved = Path("runs/a/hf_files/tokenizer.json").read_bytes()
    plan = ["schedule.steps=3", "data.path=others"]
    with pytest.raises(CheckpointError) as caught:
        train("name=a", *TEXT, *plan, "checkpoint.force=[data.path]")
    advice = str(caught.value).partition("keep the saved one: ")[2].partition(";")[0].split(" ")
    assert [line["step"] for line in train("name=a", *TEXT, *plan, *advice)] == [1, 2, 3]
    assert Path("runs/a/hf_files/tokenizer.json").read_bytes() == saved
    # And on from there under the same settings, none of them forced.
    again = train("name=a", *TEXT, *plan, *advice[:2], "schedule.steps=4")
    assert [line["step"] for line in again] == [1, 2, 3, 4]


def test_more_rows_a_step_go_on_from_the_same_row_when_forced() -> None:
    train("name=a", "schedule.steps=2")
    plan = ["engine.accumulation=2", "schedule.steps=3", "checkpoint.force=[engine.accumulation]"]
    assert [record["rows"] for record in train("name=a", *plan)] == [1, 1, 2]


def test_warm_start_takes_weights_alone_from_a_checkpoint_of_any_stage_or_its_export() -> None:
    first = train("name=a", "schedule.steps=3", "engine=zero2", "checkpoint.export=true")
    plan = ["schedule.steps=2", "optim=sgd", "seed=7"]
    warm = train("name=b", *plan, "checkpoint.weights_from=runs/a/checkpoints/step_000003")
    from_export = train("name=c", *plan, "checkpoint.weights_from=runs/a/hf")
    pretrained = train("name=d", *plan, "model.path=runs/a/hf", "model.init=pretrained")
    for key in ("step", "loss", "grad_norm", "lr", "tokens_total"):
        values = [[line[key] for line in lines] for lines in (warm, from_export, pretrained)]
        assert values[0] == values[1] == values[2], key
    assert warm[0]["step"] == 1 and warm[0]["loss"] < first[0]["loss"]
    shutil.rmtree("runs/a")  # a restart goes on from its own checkpoint, and needs the first one no more
    again = train("name=b", *plan, "schedule.steps=3", "checkpoint.weights_from=runs")
    assert [line["step"] for line in again] == [1, 2, 3] and again[:2] == warm


@pytest.mark.parametrize(
    "weights, more, error, text",
    [
        ("runs/a", [], CheckpointError, "name one, such as .*step_000001"),
        (
            "runs/a/checkpoints/step_000001",
            ["model.architecture.intermediate_size=32"],
            ModelError,
            "mis-shaped",
        ),
        (
            "runs/a/checkpoints/step_000001",
            ["model.architecture.num_hidden_layers=3"],
            ModelError,
            "missing: model",
        ),
        ("empty", [], ModelError, "has neither model.safetensors"),
        ("nowhere", [], ConfigError, "weights_from='nowhere'"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    weights: str, more: list[str], error: type[Exception], text: str
) -> None:
    train("name=a", "schedule.steps=1")
    Path("empty").mkdir()
    with pytest.raises(error, match=text):
        train("name=b", *more, f"checkpoint.weights_from={weights}")
    assert not Path("runs/b/metrics.jsonl").exists()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("stage, precision", [(0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_export_of_a_checkpoint_is_the_one_that_the_run_wrote(
    stage: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts("texts", "ab")
    rope = ["model.rope.scaling=yarn", "model.rope.original_length=16"]
    engine = [f"engine=zero{stage}", f"engine.precision={precision}", "model.freeze=['*k_norm*']"]
    train("name=a", *TEXT, *engine, *rope, "schedule.steps=2", "checkpoint.every=1", "checkpoint.export=true")
    run = Path("runs/a").resolve()
    # On another host there is the run's folder and nothing else.
    shutil.rmtree("data")
    shutil.rmtree("texts")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    told: list[str] = []
    monkeypatch.setattr(zero_files, "CHUNK", 1000)  # most parameters take several reads
    out = export_run(Request(run), told.append)
    assert files_of(out) == files_of(run / "hf") and len(files_of(out)) >= 5
    assert out == run / "hf_step_000002" and "exported" in told[-1]
    earlier = export_run(Request(run, step=1, out=tmp_path / "one", dtype="fp32"), told.append)
    assert files_of(earlier).keys() == files_of(out).keys()
    model: Any = AutoModelForCausalLM.from_pretrained(earlier)
    assert model.dtype == torch.float32 and model.config.max_position_embeddings == 64
    assert model.config.rope_parameters["factor"] == 4.0


def test_export_says_what_is_missing_and_pushes_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    train("name=a", "schedule.steps=1")
    pushed: list[Any] = []

    class Hub:
        def create_repo(self, name: str, **settings: Any) -> None:
            pushed.append((name, settings))
            if name == "closed/a":
                raise OSError("no way in")

        def upload_folder(self, repo_id: str, folder_path: Path) -> None:
            pushed.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr(module, "HfApi", Hub)
    export_run(Request(Path("runs/a").resolve(), push="me/a"), print)
    assert pushed[0] == ("me/a", {"private": True, "exist_ok": True})
    assert pushed[1] == ("me/a", ["config.json", "generation_config.json", "model.safetensors"])
    with pytest.raises(CheckpointError, match="is complete, but pushing it to closed/a failed: no way in"):
        export_run(Request(Path("runs/a").resolve(), push="closed/a"), print)
    with pytest.raises(CheckpointError, match=r"no checkpoint folder .*step_000007.*step_000001"):
        export_run(Request(Path("runs/a").resolve(), step=7), print)
    with pytest.raises(CheckpointError, match="in use: it is not overwritten"):
        export_run(Request(Path("runs/a").resolve(), out=Path("runs").resolve()), print)
    shutil.rmtree("runs/a/hf_files")
    with pytest.raises(CheckpointError, match=r"no hf_files/config\.json"):
        export_run(Request(Path("runs/a").resolve()), print)


def test_export_beside_a_run_that_deletes_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    train("name=a", "schedule.steps=2", "checkpoint.every=1")
    run, told = Path("runs/a").resolve(), list[str]()
    newest = run / "checkpoints" / "step_000002"
    shutil.copytree(newest, "kept")

    def vanish(path: Path, manifest: Any) -> ZeroFiles:
        files = ZeroFiles(path, manifest)
        if path == newest:
            shutil.rmtree(path)
        return files

    monkeypatch.setattr(module, "ZeroFiles", vanish)
    assert export_run(Request(run), told.append) == run / "hf_step_000001"
    assert any("step_000002 was deleted while it was read" in line for line in told)
    shutil.copytree("kept", newest)
    with pytest.raises(CheckpointError, match=r"was deleted while it was read.*leave step= out"):
        export_run(Request(run, step=2), told.append)
    (run / "checkpoints" / "step_000001" / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"nothing can be exported.*has no manifest\.json.*step=N"
    ) as caught:
        export_run(Request(run), told.append)
    assert "step 0" not in str(caught.value) and "checkpoint.resume" not in str(caught.value)


def test_arguments_of_the_export_are_all_judged_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_arguments(["rum=x", "step=last", "dtype=int8", "out="])
    assert {fault.key for fault in caught.value.faults} == {"rum", "run", "step", "dtype", "out"}
    train("name=a", "schedule.steps=1")
    got = read_arguments(["run=runs/a", "step=1", "dtype=bf16", "out=model"])
    assert got == Request(Path("runs/a").resolve(), 1, Path("model").resolve(), "bf16")
    assert json.loads(Path("runs/a/hf_files/config.json").read_text())["vocab_size"] == 64
    assert journal("a")


def test_help_of_the_export_needs_nothing_heavy() -> None:
    script = Path(__file__).parents[2] / "launch" / "export.py"
    code = f"""
import runpy, sys
sys.argv = ["export.py", "--help"]
runpy.run_path({str(script)!r}, run_name="__main__")
assert not {{"torch", "transformers", "deepspeed"}} & set(sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "launch/export.py run=" in ended.stdout


def test_files_that_hold_something_else_are_told() -> None:
    train("name=a", "schedule.steps=1")
    folder = Path("runs/a/checkpoints/step_000001")
    manifest = read_manifest(folder)
    (states,) = folder.glob("*optim_states.pt")
    content = torch.load(states, weights_only=False)
    masters = content["optimizer_state_dict"]["fp32_flat_groups"]
    content["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0) for _ in masters]
    torch.save(content, states)
    with pytest.raises(CheckpointError, match="NVMe"):
        ZeroFiles(folder, manifest)
    torch.save({}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="parameter by parameter"):
        ZeroFiles(folder, manifest)
