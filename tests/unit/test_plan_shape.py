"""The forecast's numbers of a model are those of the built one."""

from __future__ import annotations

import pytest

from stack.config.compose import CONF, compose_config
from stack.config.schema import ModelConfig
from stack.errors import ConfigError
from stack.models.build import _on_meta
from stack.models.config import read_architecture
from stack.models.flops import hardware_flops, model_flops
from stack.models.spec import describe
from stack.plan.changes import preset
from stack.plan.shape import read_shape

READY = sorted(file.stem for file in (CONF / "model").glob("*.yaml") if file.stem != "hf")
ALIKE = (
    "family", "num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab", "tied", "num_experts",
    "experts_per_token", "windows", "num_parameters", "attention_weights", "mlp_weights",
)  # fmt: skip


SOUND = {
    "model_type": "qwen2", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def _small(name: str) -> ModelConfig:
    """Two layers of a ready model, without weights."""
    fields = dict(dict(preset("model", name))["architecture"]) | {"num_hidden_layers": 2}
    return ModelConfig(name=name, init="scratch", architecture=fields)


@pytest.mark.parametrize("name", READY)
def test_a_ready_model_has_the_built_ones_numbers(name: str) -> None:
    import torch

    cfg = _small(name)
    built = _on_meta(read_architecture(cfg).config, torch.bfloat16)
    spec, shape = describe(built), read_shape(cfg)
    assert {key: getattr(shape, key) for key in ALIKE} == {key: getattr(spec, key) for key in ALIKE}
    names = {parameter: value.numel() for parameter, value in built.named_parameters()}
    mine = {f"model.layers.1.{key}": size for key, size, _ in shape.layer}
    assert mine.items() <= names.items()
    assert list(mine) == [key for key in names if ".layers.1." in key], "the order of gathering hangs on it"
    assert model_flops(shape, [300, 17]) == model_flops(spec, [300, 17])  # type: ignore[arg-type]  # the same names
    for lean in (False, True):
        flops = [
            hardware_flops(one, [512], checkpointing=True, tiled_mlp=True, lean=lean)  # type: ignore[arg-type]  # as above
            for one in (shape, spec)
        ]
        assert flops[0] == flops[1]


def test_biases_windows_and_frozen_parameters() -> None:
    fields = SOUND | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    import torch

    cfg = ModelConfig(init="scratch", architecture=fields, freeze=["*norm*"])
    spec, shape = describe(_on_meta(read_architecture(cfg).config, torch.float32)), read_shape(cfg)
    assert shape.windows == spec.windows == (None, 8, 8)
    assert shape.num_parameters == spec.num_parameters
    assert not shape.is_trained("model.norm.weight") and shape.is_trained("model.layers.0.mlp.up_proj.weight")


def test_a_tied_head_is_frozen_under_either_name() -> None:
    cfg = compose_config(["model=qwen3_0_6b", "model.freeze=['lm_head*']"], strict=False).model
    assert not read_shape(cfg).is_trained("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"model_type": "gpt_neox", "hidden_size": 8}, "model_type"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "alike"),
        ({}, "can be read"),
        (SOUND | {"num_hidden_layers": 0}, "num_hidden_layers=0: expected a whole number above 0"),
        (SOUND | {"num_hidden_layers": "two"}, "num_hidden_layers='two'"),
        ({key: value for key, value in SOUND.items() if key != "hidden_size"}, "hidden_size=None"),
        (SOUND | {"hidden_size": 30}, "hidden_size=30: expected a multiple of the 4 attention heads"),
        (SOUND | {"num_experts": 4}, "num_experts_per_tok=None"),
        (SOUND | {"num_experts": "few"}, "num_experts='few'"),
        (SOUND | {"intermediate_size": [64, 32]}, "one number"),
        (SOUND | {"sliding_window": "wide"}, "sliding_window='wide'"),
        (SOUND | {"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
    ],
)
def test_what_is_not_known_is_refused(fields: dict[str, object], want: str) -> None:
    with pytest.raises(ConfigError, match=want):
        read_shape(ModelConfig(architecture=fields))
