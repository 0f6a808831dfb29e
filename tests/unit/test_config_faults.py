"""Broken configurations: each gives its clear fault, and all of them at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from stack.config.checks import check, schedule_faults
from stack.config.compose import compose_config
from stack.config.model_checks import architecture_faults
from stack.config.schema import ModelConfig, RunConfig
from stack.errors import ConfigError, Fault

BASE = "+exp=quickstart"

# Overrides of the quickstart -> key of the fault, and a part of its message.
BROKEN: list[tuple[list[str], str, str]] = [
    # Names
    (["optim.lrr=1"], "optim.lrr", "did you mean optim.lr"),
    (["+optim.lrr=1"], "optim.lrr", "did you mean optim.lr"),
    (["++optim.lrr=1"], "optim.lrr", "did you mean optim.lr"),
    (["train.typo=3"], "train.typo", "known are name, out, seed"),
    (["++memory.tiledloss=true"], "memory.tiledloss", "memory.tiled_loss"),
    (["model.rope={scaling: yarn, factr: 2}"], "model.rope.factr", "model.rope.factor"),
    (["model=qwen3_9b"], "model", "did you mean qwen3_8b"),
    (["+modle=tiny"], "modle", "did you mean model"),
    (["optim={lr: 0.5}"], "optim", "one of adamw, sgd"),
    (["model=null"], "model", "one of "),
    (["model@other=tiny"], "model@other", "in its own place"),
    (["~optim.lr"], "~optim.lr", "every setting has a value"),
    (["~model"], "~model", "every setting has a value"),
    (["optim.lr=1e-5,1e-4"], "optim.lr", "a command starts one run"),
    (["optim.lr"], "optim.lr", "key=value"),
    (["data.path=~/books"], "data.path", "quote special characters"),
    # Types and ranges
    (["optim.lr=fast"], "optim.lr", "a finite number"),
    (["optim.lr=nan"], "optim.lr", "a finite number"),
    (["optim.lr=-1e-5"], "optim.lr", "above 0"),
    (["optim.lr=0"], "optim.lr", "above 0"),
    (["optim.betas=[0.9,1.0]"], "optim.betas", "two numbers"),
    (["optim.betas=[0.9]"], "optim.betas", "two numbers"),
    (["optim.clip=-1"], "optim.clip", "0 or more"),
    (["engine.stage=4"], "engine.stage", "one of 0, 1, 2, 3"),
    (["log.wandb=off"], "log.wandb", "one of auto, online, offline, disabled"),
    (["data.seq_len=4096.5"], "data.seq_len", "a whole number"),
    (["data.seq_len=1"], "data.seq_len", "at least 2 tokens"),
    (["data.eval_fraction=0.9"], "data.eval_fraction", "from 0 to 0.5"),
    (["memory.loss_tile=0"], "memory.loss_tile", "above 0"),
    (["memory.mlp_tile=-4"], "memory.mlp_tile", "above 0"),
    (["method.label_smoothing=1"], "method.label_smoothing", "below 1"),
    (["method.z_loss=-0.1"], "method.z_loss", "0 or more"),
    (["name=a/b"], "name", "a folder name"),
    (["name='../up'"], "name", "a folder name"),
    (["out=''"], "out", "not empty"),
    (["seed=-1"], "seed", "2^63"),
    (["log.every=0"], "log.every", "above 0"),
    # Ranks and heads
    (["parallel.sp=0"], "parallel.sp", "above 0"),
    (["parallel.sp=3"], "parallel.sp", "one of 1, 2, 4"),
    (["data.seq_len=3", "parallel.sp=4"], "data.seq_len", "one token for each"),
    (["data.micro_batch=1000000", "parallel.sp=1"], "data.micro_batch", "2^31"),
    # Model and positions
    (["model=hf"], "model.path", "weights from"),
    (["model.architecture.model_type=null"], "model.architecture", "model_type"),
    (["model.path=./no-such-folder"], "model.path", "config.json"),
    (["model.path=''"], "model.path", "hub name"),
    (["model.freeze=['*']"], "model.freeze", "something to train"),
    (["data.seq_len=32768"], "data.seq_len", "max_position_embeddings=32768"),
    (["data.seq_len=32768", "model.path=some/model"], "data.seq_len", "model.rope.scaling=yarn"),
    (["model=qwen3_8b", "data.seq_len=65536"], "model.rope.scaling", "model.rope.scaling=yarn"),
    (["model.rope={scaling: yarn, factor: 1.5}", "data.seq_len=65536"], "model.rope.factor", "at least 4"),
    (["model.rope.factor=4"], "model.rope.factor", "takes none"),
    (["model=qwen3_8b", "model.rope.theta=10000"], "model.rope.theta", "1e+06"),
    (["model.attention=eager"], "model.attention", "square of the length"),
    (["model.attention=flash_atention_2"], "model.attention", "model.attention=flash_attention_2"),
    (["model.attention=flash_attention_3"], "model.attention", "fp32"),
    (["model.attention=flex_attention", "site=cpu"], "model.attention", "flex_attention lacks"),
    (["model.attention=kernels-community/flash-attn2", "site=cpu"], "model.attention", "needs a GPU"),
    # Text and tokens
    (["data.train_tokenizer=false"], "model.tokenizer", "a tokenizer"),
    (["model=qwen3_8b"], "data.train_tokenizer", "init=pretrained"),
    (["model.tokenizer=some/where"], "data.train_tokenizer", "one of the two"),
    (["data.vocab_size=8192"], "data.vocab_size", "at most 4096"),
    (["data.vocab_size=100"], "data.vocab_size", "256 bytes"),
    (["data.source=random"], "data.train_tokenizer", "no text"),
    (["data=text"], "data.path", "text files"),
    (["data=jsonl", "data.path=nowhere.jsonl"], "data.path", "that exist"),
    (["data.path=conf"], "data.path", "reads none"),
    (["data=parquet", "data.path=nowhere"], "data.path", "Parquet files that exist"),
    (["data=hf"], "data.path", "the name of a dataset"),
    (["data=tokens", "data.path=conf"], "data.train_tokenizer", "no text"),
    (["data.subset=en"], "data.subset", "only datasets of Hugging Face"),
    (["data.token_eos=0"], "data.token_eos", "null for sources other than tokens"),
    (["data.mixture=[{name: a, source: text, path: x}]"], "data.mixture.a.path", "text files that exist"),
    (["data.mixture=[{name: a, path: conf}]"], "data.mixture.a.path", "reads none"),
    # Memory, engine
    (["memory=alst", "memory.checkpointing=none"], "memory.offload", "without checkpointing"),
    (["memory=lean", "memory.host_gib=8"], "memory.host_gib", "without memory.spill_folder"),
    (["memory=lean", "memory.spill_folder=/tmp"], "memory.host_gib", "before memory.spill_folder is used"),
    (["memory=lean", "memory.spill_folder=/no/such", "memory.host_gib=8"], "memory.spill_folder", "exists"),
    (["memory=alst", "memory.spill_folder=/tmp", "memory.host_gib=8"], "memory.spill_folder", "only lean"),
    (["memory.fused_kernels=liger", "site.device=cpu"], "memory.fused_kernels", "need a GPU"),
    (["memory.fused_kernels=liger", "site.device=cuda"], "memory.fused_kernels", "not installed"),
    (["engine.stage=2", "engine.offload_param=cpu"], "engine.offload_param", "stage 3"),
    (["engine.stage=1", "engine.offload_optimizer=nvme"], "engine.offload_optimizer", "stage 3"),
    (["engine.stage=0", "engine.offload_optimizer=cpu"], "engine.offload_optimizer", "stage=0"),
    (["engine.offload_optimizer=nvme"], "engine.nvme_path", "NVMe"),
    (["engine=zero3_nvme"], "engine.nvme_path", "NVMe"),
    (["engine=zero3_nvme", "engine.nvme_path=/no/such/disk"], "engine.nvme_path", "exists"),
    (["engine.nvme_path=/tmp", "engine.offload_param=nvme"], "engine.offload_param", "empties"),
    (["engine.cpu_optimizer=deepspeed"], "engine.cpu_optimizer", "on the host"),
    (["engine.precision=fp16", "engine.stage=0"], "engine.stage", "never multiplied in"),
    (["engine.precision=fp16", "site=cpu"], "engine.precision", "refuses fp16"),
    (["engine.ds_config=nowhere.json"], "engine.ds_config", "can be read"),
    (["engine.ds_config=README.md"], "engine.ds_config", "JSON"),
    (["engine.timeout_s=0"], "engine.timeout_s", "above 0"),
    # Schedule and saving
    (["schedule.steps=null"], "schedule.steps", "in steps or in epochs"),
    (["schedule.epochs=2"], "schedule.steps", "one of the two"),
    (["schedule.steps=0"], "schedule.steps", "above 0"),
    (["schedule.warmup_steps=1000"], "schedule.warmup_steps", "at most the 200 steps"),
    (["schedule=wsd", "schedule.decay_steps=189"], "schedule.decay_steps", "at most 188"),
    (["schedule.decay_steps=5"], "schedule.decay_steps", "null with schedule.name=cosine"),
    (["schedule=linear"], "schedule.min_lr_ratio", "no lowest rate"),
    (["schedule.min_lr_ratio=2"], "schedule.min_lr_ratio", "from 0 to 1"),
    (["checkpoint.upload=nosuch://bucket"], "checkpoint.upload", "fsspec can open"),
    (["checkpoint.keep_best=1", "checkpoint.every=10", "log.eval_every=4"], "checkpoint.keep_best", "every 4 steps"),
    (["checkpoint.keep_best=1", "checkpoint.every=10", "log.eval_every=0"], "checkpoint.keep_best", "0: never"),
    (["checkpoint.weights_from=no/such/folder"], "checkpoint.weights_from", "the folder of a checkpoint"),
    (["checkpoint.weights_from=.", "checkpoint.resume=x"], "checkpoint.weights_from", "null beside"),
    (["checkpoint.force=[data.pth]"], "checkpoint.force", "names of settings"),
    (["faults.on_nonfinite=rollback"], "faults.on_nonfinite", "no checkpoint to go back to"),
    (["faults=rollback", "checkpoint=final"], "faults.on_spike", "no checkpoint to go back to"),
    (["faults.on_spike=stop"], "faults.on_spike", "faults.spike_factor=0"),
    (["faults.spike_factor=0.5"], "faults.spike_factor", "above 1"),
    (["log.eval_every=5", "log.eval_rows=0"], "log.eval_every", "held out"),
]  # fmt: skip


def _faults(overrides: Sequence[str], world: int | None = None, folder: Path | None = None) -> list[Fault]:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides, world=world, folder=str(folder) if folder else None)
    return caught.value.faults


@pytest.mark.parametrize(("overrides", "key", "fragment"), BROKEN, ids=[" ".join(row[0]) for row in BROKEN])
def test_broken(
    overrides: list[str], key: str, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("no JSON")
    monkeypatch.chdir(tmp_path)  # relative paths are seen from the start folder
    faults = _faults([BASE, *overrides])
    hits = [fault for fault in faults if fault.key == key]
    assert hits, faults
    assert any(fragment in str(fault) for fault in hits), hits
    assert all(fault.want and fault.fix for fault in faults)


def test_the_base_of_the_table_is_sound() -> None:
    assert compose_config([BASE], world=2).name == "quickstart"
    assert len(BROKEN) >= 30


def test_all_faults_come_at_once() -> None:
    overrides = [
        "optim.lrr=1",
        "++memory.x=1",
        "~optim.eps",
        "optim.lr=-1",
        "schedule.steps=many",
        "memory=alst",
        "memory.checkpointing=none",
        "engine.offload_optimizer=nvme",
        "name=a/b",
    ]
    faults = _faults([BASE, *overrides], world=3)
    assert {fault.key for fault in faults} == {
        "optim.lrr",
        "memory.x",
        "~optim.eps",
        "optim.lr",
        "schedule.steps",
        "memory.offload",
        "engine.nvme_path",
        "name",
        "parallel.sp",
    }
    message = str(ConfigError(faults))
    assert message.startswith("9 faults") and message.count("Fix: ") == 9


def test_a_value_is_complained_about_once() -> None:
    faults = _faults([BASE, "parallel.sp=-2", "schedule.steps=-5"], world=2)
    assert sorted(fault.key for fault in faults) == ["parallel.sp", "schedule.steps"]


# A field of the quickstart's model -> its key in the fault, and a part of the message.
WRONG_FIELDS: list[tuple[str, str, str]] = [
    ("num_attention_heads=four", "num_attention_heads", "above 0"),
    ("num_attention_heads=0", "num_attention_heads", "above 0"),
    ("num_attention_heads=true", "num_attention_heads", "above 0"),
    ("num_key_value_heads=0", "num_key_value_heads", "above 0, or null"),
    ("num_key_value_heads=3", "num_key_value_heads", "num_key_value_heads=2"),
    ("num_hidden_layers=0", "num_hidden_layers", "above 0"),
    ("num_hidden_layers=two", "num_hidden_layers", "above 0"),
    ("num_hidden_layers=2.5", "num_hidden_layers", "whole number"),
    ("hidden_size=null", "hidden_size", "above 0"),
    ("intermediate_size=0", "intermediate_size", "above 0"),
    ("intermediate_size=null", "intermediate_size", "above 0"),
    ("intermediate_size=[]", "intermediate_size", "a list of them"),
    ("vocab_size=5k", "vocab_size", "above 0"),
    ("max_position_embeddings=big", "max_position_embeddings", "above 0"),
    ("head_dim=-8", "head_dim", "above 0, or null"),
    ("rope_theta=big", "rope_theta", "a number"),
    ("rope_scaling=yarn", "rope_scaling", "a section of settings"),
    ("rope_parameters=[1]", "rope_parameters", "a section of settings"),
    ("rope_scaling={type:yarn,factor:four}", "rope_scaling.factor", "at least 1"),
    ("rope_scaling={type:linear,factor:0}", "rope_scaling.factor", "at least 1"),
    ("rope_scaling={type:linear,factor:null}", "rope_scaling.factor", "at least 1"),
    ("rope_scaling={type:linear,factor:inf}", "rope_scaling.factor", "at least 1"),
    (
        "rope_parameters={rope_type:yarn,factor:2,original_max_position_embeddings:no}",
        "rope_parameters.original_max_position_embeddings",
        "at least 1",
    ),
    (
        "rope_parameters={full_attention:{rope_type:linear,factor:0}}",
        "rope_parameters.full_attention.factor",
        "at least 1",
    ),
]


@pytest.mark.parametrize(("field", "key", "fragment"), WRONG_FIELDS, ids=[row[0] for row in WRONG_FIELDS])
@pytest.mark.parametrize(
    "more", [[], ["model.init=pretrained", "model.path=some/model", "model.rope.theta=5"]]
)
def test_a_wrong_field_of_the_model_is_told_beside_the_other_faults(
    field: str, key: str, fragment: str, more: list[str]
) -> None:
    faults = _faults([BASE, f"model.architecture.{field}", "optim.lr=0", *more], world=2)
    (hit,) = [fault for fault in faults if fault.key.startswith("model.architecture")]
    assert hit.key == f"model.architecture.{key}" and fragment in str(hit)
    assert "optim.lr" in {fault.key for fault in faults}


def test_a_wrong_field_of_a_model_folder_names_its_file(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3", "num_attention_heads": "four", "rope_scaling": "yarn"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    faults = _faults([BASE, f"model.path={tmp_path}"], world=2)
    assert [fault.key for fault in faults] == ["model.path", "model.path"]
    assert "config.json whose num_attention_heads is a whole number above 0, not 'four'" in str(faults[0])


PER_LAYER = {"rope_type": "default", "rope_theta": 10000.0}

# Of configs as they are published, or as transformers writes them.
SOUND_FIELDS: dict[str, dict[str, object]] = {
    "nothing": {},
    "no heads of their own": {"num_attention_heads": 8, "num_key_value_heads": None, "head_dim": None},
    "Llama 3.1": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
    "Gemma 3": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "head_dim": 256, "num_attention_heads": 10},
    "Gemma 3n": {"intermediate_size": [16384] * 3},
    "Phi": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
    "a factor to be worked out": {"rope_parameters": {"rope_type": "yarn", "factor": None}},
    "DeepSeek": {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "original_max_position_embeddings": 4096}},
    "GPT-NeoX": {"num_attention_heads": 64, "hidden_size": 6144, "rotary_pct": 0.25, "rope_scaling": None},
    "GPT-Neo": {"model_type": "gpt_neo", "intermediate_size": None},
    "by kind of layer": {"rope_parameters": {"full_attention": PER_LAYER, "sliding_attention": PER_LAYER}},
    "a kind without": {"rope_parameters": {"full_attention": None, "sliding_attention": PER_LAYER}},
    "a base for each layer": {"rope_theta": [10000.0, 5000000.0]},
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND_FIELDS)
def test_what_models_are_published_with_is_no_fault(case: str) -> None:
    assert list(architecture_faults(ModelConfig(architecture=SOUND_FIELDS[case]))) == []


@pytest.mark.parametrize(
    ("sp", "world", "good"), [(2, 2, True), (2, 4, True), (2, 3, False), (4, 2, False), (2, None, True)]
)
def test_ranks(sp: int, world: int | None, good: bool) -> None:
    if good:
        assert compose_config([BASE, f"parallel.sp={sp}"], world=world).parallel.sp == sp
    else:
        (fault,) = _faults([BASE, f"parallel.sp={sp}"], world=world)
        assert fault.key == "parallel.sp" and f"{world} rank(s)" in fault.want


def test_the_device_is_judged_once_it_is_known() -> None:
    cfg = compose_config([BASE, "model.attention=flex_attention"])
    assert check(cfg, device="cuda") == []
    assert [fault.key for fault in check(cfg, device="cpu")] == ["model.attention"]


def test_a_length_in_epochs_is_judged_once_the_data_is_known() -> None:
    cfg = compose_config([BASE, "schedule.steps=null", "schedule.epochs=1"])
    assert list(schedule_faults(cfg, 12)) == []
    assert [fault.key for fault in schedule_faults(cfg, 11)] == ["schedule.warmup_steps"]


def test_an_unknown_model_is_not_judged() -> None:
    cfg = RunConfig()
    cfg.model.path, cfg.schedule.steps, cfg.parallel.sp = "some/model", 10, 7
    assert check(cfg, world=7) == []


HEAD = "# @package _global_\n"

# An experiment's file -> a part of the message.
FILES: dict[str, tuple[str, str]] = {
    "group that does not exist": (f"{HEAD}defaults: [override /model: qwen3_9b, _self_]\n", "qwen3_8b"),
    "override of no group": (f"{HEAD}defaults: [override /modle: tiny, _self_]\n", "modle"),
    "broken YAML": (f"{HEAD}optim:\n  lr: [1,\n", "valid YAML"),
    "key twice": (f"{HEAD}name: a\nname: b\n", "duplicate key name"),
    "no package line": ("name: mine\n", "# @package _global_"),
    "unknown keys": (f"{HEAD}optim: {{lrr: 3}}\n", "did you mean optim.lr"),
    "unknown section": (f"{HEAD}memroy: {{x: 1}}\n", "did you mean memory"),
    "no section": (f"{HEAD}optim: 3\n", "a section of named settings"),
    "empty section": (f"{HEAD}optim:\n", "a section of named settings"),
    "off is a truth value": (f"{HEAD}log: {{wandb: off}}\n", "quoted in YAML"),
    "reference to nothing": (f"{HEAD}name: ${{nothing}}\n", "nothing"),
    "variable that is not set": (f"{HEAD}name: ${{oc.env:NO_SUCH_VARIABLE}}\n", "NO_SUCH_VARIABLE"),
    "a list": (f"{HEAD}- a\n", "exp/mine"),
    "not UTF-8": (f"{HEAD}name: \udcff\n", "utf-8"),
}


@pytest.mark.parametrize("case", FILES)
def test_broken_file(case: str, tmp_path: Path) -> None:
    content, fragment = FILES[case]
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_bytes(content.encode("utf-8", "surrogateescape"))
    message = str(ConfigError(_faults(["+exp=mine"], folder=tmp_path)))
    assert fragment in message, message


def test_a_fault_of_the_file_does_not_hide_those_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(f"{HEAD}name: [")
    faults = _faults(["+exp=mine", "optim.lrr=1"], folder=tmp_path)
    assert [fault.key for fault in faults] == ["optim.lrr", str(tmp_path / "exp" / "mine.yaml")]


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "b[1]"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    compose_config([BASE, "data=text", f'data.path="{folder}"'])
