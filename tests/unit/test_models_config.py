"""Ready configs, settings that cannot be used, and models that would be trained wrongly."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stack.config.schema import ModelConfig, RopeConfig
from stack.dist import network
from stack.errors import ConfigError, ModelError
from stack.models.attention import attention_faults
from stack.models.build import build_model, prepare_model
from stack.models.config import read_architecture
from stack.models.spec import describe
from tests.unit.models_rig import architecture, pretrained, saved, scratch

FOLDER = Path(__file__).parents[2] / "conf" / "model"

# Parameters as the model cards (and the files on the hub) give them; those of the last three counted by hand.
PUBLISHED = {
    "qwen3_0_6b": (596_049_920, True),
    "qwen3_1_7b": (1_720_574_976, True),
    "qwen3_4b": (4_022_468_096, True),
    "qwen3_8b": (8_190_735_360, False),
    "qwen3_14b": (14_768_307_200, False),
    "qwen3_32b": (32_762_123_264, False),
    "qwen3_30b_a3b": (30_532_122_624, False),
    "llama3_8b": (8_030_261_248, False),
    "llama3_70b": (70_553_706_496, False),
    "mistral_7b": (7_248_023_552, False),
    "smollm2_135m": (134_515_008, True),
    "tiny": (3_212_672, True),
    "micro": (22_720, False),
    "bench": (5_245_440, False),
}


def ready(name: str, **changes: Any) -> ModelConfig:
    fields = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return ModelConfig(**fields | {"rope": RopeConfig(**fields.get("rope", {}))} | changes)


def test_every_ready_config_is_known_here() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == {*PUBLISHED, "hf"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_ready_configs_have_the_published_size(name: str) -> None:
    cfg = ready(name, init="scratch")
    built = prepare_model(cfg, 512, torch.bfloat16, 0).built
    assert (built.spec.num_parameters, built.spec.tied) == PUBLISHED[name]
    assert cfg.name == name
    assert all(parameter.is_meta for parameter in built.model.parameters())


def test_active_parameters_of_a_mixture() -> None:
    known = prepare_model(ready("qwen3_30b_a3b", init="scratch"), 512, torch.bfloat16, 0).built.spec
    assert known.num_active_parameters == pytest.approx(3.3e9, rel=0.02)  # "3.3B activated" in the model card
    assert (known.num_experts, known.experts_per_token, known.intermediate) == (128, 8, 768)


@pytest.mark.parametrize(("name", "factor"), [("qwen3_8b", 32.0), ("qwen3_4b", 32.0), ("mistral_7b", 32.0)])
def test_a_million_tokens_by_yarn(name: str, factor: float) -> None:
    cfg = ready(name, init="scratch")
    cfg.rope.scaling = "yarn"
    rope = prepare_model(cfg, 1_048_576, torch.bfloat16, 0).built.rope
    assert (rope.factor, rope.original_length, rope.theta, rope.max_length) == (factor, 32768, 1e6, 1_048_576)


def test_a_hub_name_without_network_is_one_error_within_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"Qwen/Qwen3-8B.*HF_HOME.*model.init=scratch"):
        build_model(ready("qwen3_8b"), 512, torch.bfloat16, 0)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("path", ["./gone", "/gone/model", "a/b/c", "~/gone"])
def test_a_folder_that_is_not_there(path: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_architecture(ModelConfig(path=path))


def test_what_is_neither_folder_nor_hub_name() -> None:
    with pytest.raises(ModelError, match="hub name"):
        read_architecture(ModelConfig(path="my model!"))


def test_whether_the_network_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(network, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert network.hub_reachable()
        monkeypatch.setattr(network, "getproxies", lambda: {"https": f"http://127.0.0.1:{port}"})
        monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
        assert network.hub_reachable()
    assert not network.hub_reachable()


@pytest.mark.parametrize(
    ("cfg", "key"),
    [
        (ModelConfig(init="pretrained"), "model.path"),
        (ModelConfig(init="scratch"), "model.architecture"),
        (scratch(hiden_size=64), "model.architecture.hiden_size"),
        (ModelConfig(init="scratch", architecture={"model_type": "qwen33"}), "model.architecture.model_type"),
        (ModelConfig(init="scratch", architecture={"hidden_size": 32}), "model.architecture.model_type"),
        (scratch(hidden_size="wide"), "model.architecture"),
    ],
)
def test_settings_that_name_no_model(cfg: ModelConfig, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_architecture(cfg)
    assert [fault.key for fault in caught.value.faults] == [key]


def test_an_unknown_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        read_architecture(scratch(hiden_size=64))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "t5"}, "not a causal language model"),
        ({"model_type": "vit"}, "not a causal language model"),
        (architecture("qwen3_moe", output_router_logits=True), "load-balancing"),
        (architecture() | {"num_attention_heads": 3, "num_key_value_heads": 2}, "3 query heads"),
    ],
)
def test_models_that_are_not_for_this(fields: dict[str, Any], says: str) -> None:
    with pytest.raises((ModelError, ConfigError), match=says):
        prepare_model(ModelConfig(init="scratch", architecture=fields), 32, torch.float32, 0)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1)
    )
    with pytest.raises(ModelError, match="quantised"):
        prepare_model(pretrained(folder), 32, torch.float32, 0)


def test_the_folders_own_config_wins_and_says_so(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    for init in ("pretrained", "scratch"):
        cfg = ModelConfig(
            path=str(folder), init=init, architecture=architecture(vocab_size=128, hidden_size=32)
        )
        built = build_model(cfg, 32, torch.float32, 0)
        assert built.spec.vocab == 64
        assert built.notes == ("the folder's config replaces model.architecture: vocab_size 128 -> 64",)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("minicpm3", "hidden states between body and head"),
        ("stablelm", "does not hand document boundaries down"),
        ("falcon_h1", "no `mlp`|convolution"),
        ("qwen3_next", "no `self_attn`"),
        ("deepseek_v3", "keys of 192 and values of 128"),
        ("opt", "no `mlp`"),
        ("glm4_moe", "weights in buffers"),
    ],
)
def test_models_that_would_be_trained_wrongly_are_refused(model_type: str, says: str) -> None:
    cfg = ModelConfig(init="scratch", architecture={"model_type": model_type} | SMALL)
    cfg.architecture = {key: value for key, value in cfg.architecture.items() if _has(model_type, key)}
    with pytest.raises(ModelError, match=says):
        prepare_model(cfg, 32, torch.float32, 0)


def _has(model_type: str, key: str) -> bool:
    return key == "model_type" or hasattr(AutoConfig.for_model(model_type), key)


def meta_model() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture()))


def test_an_unknown_change_of_logits_is_refused() -> None:
    model = meta_model()
    before = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = before(*args, **kwargs)
        output.logits = output.logits.clamp(max=30.0)
        return output

    model.forward = forward
    with pytest.raises(ModelError, match="neither a factor nor a soft cap"):
        describe(model)


def test_a_layer_without_attention_is_refused() -> None:
    model = meta_model()
    model.model.layers[1].forward = lambda hidden, **kwargs: hidden
    with pytest.raises(ModelError, match="has 2 layers, but 1 of them"):
        describe(model)


def test_the_probe_leaves_no_trace() -> None:
    model = meta_model()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    implementation = model.config._attn_implementation
    describe(model)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == implementation


def test_a_family_with_other_names_needs_one_line() -> None:
    fields = {key: value for key, value in SMALL.items() if key != "pad_token_id"}
    cfg = ModelConfig(init="scratch", architecture={"model_type": "gpt_neox"} | fields)
    built = build_model(cfg, 32, torch.float32, 0)
    assert (built.spec.num_heads, built.spec.num_kv_heads, built.spec.head_dim) == (4, 4, 8)


@pytest.mark.parametrize("tied", [True, False])
def test_freezing(tied: bool) -> None:
    cfg = scratch(tie_word_embeddings=tied)
    cfg.freeze = ["*norm*", "lm_head.weight"]
    model = build_model(cfg, 32, torch.float32, 0).model
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert frozen == {name for name, _ in model.named_parameters() if "norm" in name} | {head}


def test_frozen_parameters_are_frozen_when_partition_sees_them() -> None:
    cfg = scratch()
    cfg.freeze = ["*norm*"]
    seen: dict[str, bool] = {}

    def partition(module: nn.Module) -> None:
        trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        seen[type(module).__name__] = trains

    build_model(cfg, 32, torch.float32, 0, partition)
    assert seen == {"Embedding": True, "Linear": True, "Qwen3RMSNorm": False}


@pytest.mark.parametrize("patterns", [["*nrom*"], ["*"], ["*norm*", "nothing"]])
def test_freezing_nothing_or_everything_is_refused(patterns: list[str]) -> None:
    cfg = scratch()
    cfg.freeze = patterns
    with pytest.raises(ConfigError) as caught:
        prepare_model(cfg, 32, torch.float32, 0)
    assert [fault.key for fault in caught.value.faults] == ["model.freeze"]


@pytest.mark.parametrize(
    ("name", "device", "dtype", "says"),
    [
        ("sdpa", "cpu", torch.float32, None),
        ("flex_attention", "cuda", torch.float32, None),
        ("flex_attention", "cpu", torch.float32, "backward"),
        ("flash_attention_2", "cpu", torch.bfloat16, "GPU"),
        ("kernels-community/flash-attn", "cpu", torch.bfloat16, "GPU"),
        ("eager", "cpu", torch.float32, "sdpa"),
        ("flash", "cuda", torch.bfloat16, "flash_attention_2"),
    ],
)
def test_attention_that_cannot_run_here(name: str, device: str, dtype: torch.dtype, says: str | None) -> None:
    faults = attention_faults(name, device, dtype)
    assert [fault.key for fault in faults] == ([] if says is None else ["model.attention"])
    assert says is None or says in str(faults[0])


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("flash_attention_2", "flash_attn"),
        ("flash_attention_3", "flash_attn_interface"),
        ("kernels-community/x", "kernels"),
    ],
)
def test_a_kernel_that_is_not_installed(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for check in ("is_flash_attn_2_available", "is_flash_attn_3_available", "is_kernels_available"):
        monkeypatch.setattr(f"stack.models.attention.{check}", lambda: False)
    assert package in str(attention_faults(name, "cuda", torch.bfloat16)[0])
    assert "fp32" in str(attention_faults(name, "cuda", torch.float32)[0])
