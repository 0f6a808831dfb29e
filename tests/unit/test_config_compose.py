"""Composition: every experiment and every choice, what wins over what, and no torch before it is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stack.config.compose import CONF, compose_config
from stack.config.convert import as_dict, as_yaml, convert
from stack.config.derive import REPO_ROOT
from stack.config.schema import RunConfig
from stack.engine.ds_config import build_ds_config
from stack.errors import ConfigError

RANKS = {
    "quickstart": 2,
    "tiny_cpu": 1,
    "qwen3_1m": 8,
    "qwen3_4b_256k": 1,
    "qwen3_4b_1m": 4,
    "llama3_8b_3m": 8,
    "llama3_8b_15m": 32,
    "qwen3_32b_1m": 8,
    "qwen3_30b_a3b_1m": 8,
    "qwen3_sft_256k": 1,
    "qwen3_sft_1m": 8,
}
"""Every experiment -> the ranks that its header asks for."""

ALL_LEVERS = ("tiled_loss", "tiled_mlp", "offload")


def test_no_experiment_is_left_out() -> None:
    assert {path.stem for path in (CONF / "exp").glob("*.yaml")} == set(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_experiment(name: str) -> None:
    cfg = compose_config([f"+exp={name}"], world=RANKS[name])
    assert cfg.name == name
    assert convert(yaml.safe_load(as_yaml(cfg))) == (cfg, [])  # what is saved with the run
    final = build_ds_config(cfg, RANKS[name])
    assert final["zero_optimization"]["stage"] == cfg.engine.stage
    text = (CONF / "exp" / f"{name}.yaml").read_text()
    lines = text.splitlines()
    assert lines[0] == "# @package _global_"
    assert f"+exp={name}" in text and "Hardware: " in text
    assert max(map(len, lines)) <= 110


def test_quickstart_has_every_lever_on() -> None:
    cfg = compose_config(["+exp=quickstart"])
    assert all(getattr(cfg.memory, lever) for lever in ALL_LEVERS) and cfg.memory.checkpointing == "full"
    assert (cfg.engine.stage, cfg.parallel.sp, cfg.model.init) == (3, 2, "scratch")
    assert cfg.data.seq_len >= 4096 and cfg.data.train_tokenizer


@pytest.mark.parametrize(
    ("group", "choice"),
    [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml")) if path.parent.name != "exp"],
)
def test_every_choice_of_every_group(group: str, choice: str) -> None:
    cfg = compose_config([f"{group}={choice}"], strict=False)
    section = as_dict(getattr(cfg, group))
    written = yaml.safe_load((CONF / group / f"{choice}.yaml").read_text())
    for key, value in written.items():
        if not isinstance(value, dict):
            assert section[key] == value
    if "name" in section and "name" in written:
        assert section["name"] == choice


def test_the_command_line_wins_over_the_experiment() -> None:
    exp = compose_config(["+exp=qwen3_1m"])
    assert (exp.model.name, exp.parallel.sp, exp.data.seq_len) == ("qwen3_8b", 8, 1_048_576)
    ours = compose_config(
        ["parallel.sp=4", "+exp=qwen3_1m", "optim.lr=2e-5", "model=llama3_8b", "memory=checkpoint"], world=4
    )
    assert (ours.model.name, ours.model.architecture["model_type"]) == ("llama3_8b", "llama")
    assert (ours.parallel.sp, ours.optim.lr, ours.memory.tiled_loss) == (4, 2e-5, False)
    assert ours.data.seq_len == 1_048_576  # what nobody touched is still the experiment's
    assert ours.model.rope.scaling == "yarn"


def test_a_group_replaces_the_experiments_choice_whole() -> None:
    cfg = compose_config(["+exp=qwen3_1m", "memory=plain"])
    assert as_dict(cfg.memory) == as_dict(RunConfig().memory)
    assert "hidden_act" not in compose_config(["+exp=qwen3_1m", "model=hf"], strict=False).model.architecture


@pytest.mark.parametrize(
    "overrides",
    [
        ["exp=quickstart", "optim.lr=0.5"],
        ["+exp=quickstart", "+optim.lr=0.5"],
        ["++exp=quickstart", "++optim.lr=0.5"],
        ["optim.lr=.5", "+exp=quickstart.yaml"],
        ["+exp=[quickstart]", "optim.lr=5e-1"],
    ],
)
def test_signs_are_put_right(overrides: list[str]) -> None:
    cfg = compose_config(overrides)
    assert (cfg.name, cfg.optim.lr) == ("quickstart", 0.5)


def test_open_sections_take_any_name() -> None:
    cfg = compose_config(
        [
            "+exp=quickstart",
            "model.architecture.hidden_size=128",
            "model.architecture.brand_new={deep: [1]}",
            "~model.architecture.rope_theta",
            "engine.overrides.zero_optimization.reduce_bucket_size=1e6",
            "model.freeze=['*norm*']",
        ]
    )
    assert cfg.model.architecture["hidden_size"] == 128
    assert cfg.model.architecture["brand_new"] == {"deep": [1]}
    assert "rope_theta" not in cfg.model.architecture
    assert cfg.engine.overrides == {"zero_optimization": {"reduce_bucket_size": 1e6}}
    assert cfg.model.freeze == ["*norm*"]


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_open_sections_take_a_whole_section(sign: str) -> None:
    cfg = compose_config(
        [
            "+exp=quickstart",
            f"{sign}engine.overrides={{zero_optimization:{{reduce_bucket_size:1000}},x:{{}}}}",
            f"{sign}engine.overrides={{zero_optimization:{{sub_group_size:7}}}}",
            f"{sign}data.template_variables={{enable_thinking:false,date:'26 July, 2024',n.m:null}}",
            f"{sign}cluster.environment={{A:b,C:'1'}}",
            f"{sign}model.architecture={{brand_new:[1,{{deep:'a: b'}}],rope_theta:5}}",
        ],
        strict=False,
    )
    assert cfg.engine.overrides == {
        "zero_optimization": {"reduce_bucket_size": 1000, "sub_group_size": 7},
        "x": {},
    }
    assert cfg.data.template_variables == {"enable_thinking": False, "date": "26 July, 2024", "n.m": None}
    assert cfg.cluster.environment == {"A": "b", "C": "1"}
    fields = cfg.model.architecture
    assert (fields["brand_new"], fields["rope_theta"], fields["hidden_size"]) == (
        [1, {"deep": "a: b"}],
        5,
        256,
    )


def test_an_open_section_is_a_section() -> None:
    with pytest.raises(ConfigError, match=r"engine\.overrides=None: expected a section of named settings"):
        compose_config(["+exp=quickstart", "engine.overrides=null"])
    with pytest.raises(ConfigError, match="every setting has a value"):
        compose_config(["+exp=quickstart", "~engine.overrides"])


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    lines = ["# @package _global_", "defaults: [override /model: micro, _self_]", "name: mine"]
    lines += [
        "optim: {lr: 1e-5, eps: 1E-7}",
        "schedule: {steps: 1e3}",
        "data: {seq_len: 5_00, source: random}",
    ]
    (tmp_path / "exp" / "mine.yaml").write_text("\n".join(lines))
    cfg = compose_config(["+exp=mine"], folder=str(tmp_path))
    assert (cfg.name, cfg.model.name, cfg.optim.lr, cfg.optim.eps) == ("mine", "micro", 1e-5, 1e-7)
    assert (cfg.schedule.steps, cfg.data.seq_len) == (1000, 500)
    assert compose_config(["+exp=tiny_cpu"], folder=str(tmp_path)).name == "tiny_cpu"


WATCHED = """
import atexit, runpy, sys
atexit.register(lambda: print("heavy:", sorted({"torch", "deepspeed", "transformers"} & set(sys.modules))))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _start(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The program itself, started from `folder`; its last line says which heavy packages it imported."""
    command = [sys.executable, "-c", WATCHED, str(REPO_ROOT / "launch" / "train.py"), *arguments]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["--help"], 0, "deepspeed launch/train.py +exp=NAME"),
        (["--cfg", "job", "+exp=qwen3_1m", "model=llama3_8b"], 0, "model_type: llama"),
        (["--info", "defaults-tree"], 0, "schema"),
        (["--cfg", "job", "+exp=tiny_cpu", "cluster.environment={A:b}"], 0, "A: b"),
        (["--local_rank=0", "+exp=quickstart", "optim.lrr=1"], 1, "did you mean optim.lr"),
        (["--local-rank", "0", "+exp=quikstart", "a=1"], 1, "did you mean quickstart"),
        (["--cfg", "job", "optim.lrr=1"], 1, "did you mean optim.lr"),
        (["--multirun", "optim.lr=1,2"], 1, "one command starts one run"),
        (["+exp=qwen3_1m"], 1, "a divisor of the 1 rank"),
    ],
)
def test_answers_without_torch_and_without_a_trace(
    arguments: list[str], code: int, shown: str, tmp_path: Path
) -> None:
    done = _start(arguments, tmp_path)
    assert done.returncode == code, done.stderr
    assert shown in (done.stdout if code == 0 else done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert list(tmp_path.iterdir()) == []  # no output folders, no logs


def test_shown_settings_are_those_of_the_run(tmp_path: Path) -> None:
    arguments = ["+exp=qwen3_4b_1m", "optim.lr=3e-6"]
    shown = _start(["--cfg", "job", *arguments], tmp_path).stdout.rpartition("heavy:")[0]
    assert convert(yaml.safe_load(shown)) == (compose_config(arguments), [])


def test_a_command_that_reads_some_sections_judges_no_others() -> None:
    """launch/prepare.py needs neither a length of the run nor ranks."""
    broken = ["schedule.steps=null", "data.micro_batch=0"]
    with pytest.raises(ConfigError) as caught:
        compose_config(["+exp=quickstart", *broken], only=("data", "model"))
    assert [fault.key for fault in caught.value.faults] == ["data.micro_batch"]
