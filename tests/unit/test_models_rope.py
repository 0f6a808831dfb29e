"""Positions: one effective factor in training, in the exported config and after a reload; wrong settings refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stack.checkpoint.export_hf import export_hf
from stack.config.schema import RopeConfig
from stack.errors import ConfigError, ModelError
from stack.models.build import BuiltModel, build_model, check_positions
from tests.unit.models_rig import architecture, pretrained, saved, scratch


def rotary(model: Any) -> Any:
    return model.model.rotary_emb


def exported(built: BuiltModel, folder: Path) -> Any:
    export_hf(built, built.model.named_parameters(), folder, built.model.dtype)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_yarn_keeps_the_checkpoints_base(dtype: torch.dtype, tmp_path: Path) -> None:
    """The checkpoint gives theta 1e6 and length 64, the settings only `yarn` and 4."""
    folder = saved(tmp_path / "model")
    built = build_model(pretrained(folder, rope=RopeConfig(scaling="yarn", factor=4.0)), 200, dtype, 0)
    frequencies = rotary(built.model).inv_freq
    assert frequencies.dtype == torch.float32
    assert frequencies[1].item() == pytest.approx(0.0079057, rel=1e-4)
    assert rotary(built.model).attention_scaling == pytest.approx(1.13863, rel=1e-5)
    plain = AutoModelForCausalLM.from_config(built.model.config)
    assert torch.equal(frequencies, rotary(plain).inv_freq)


def test_scaling_changes_the_frequencies() -> None:
    without = build_model(scratch(), 64, torch.float32, 0)
    with_yarn = build_model(scratch(rope=RopeConfig(scaling="yarn")), 65, torch.float32, 0)
    assert not torch.equal(rotary(without.model).inv_freq, rotary(with_yarn.model).inv_freq)
    assert with_yarn.rope.factor == 2.0
    check_positions(with_yarn)


@pytest.mark.parametrize("max_length", [64, 256, None], ids=["max64", "max256", "absent"])
@pytest.mark.parametrize("where", ["checkpoint", "settings"])
def test_one_factor_whatever_max_position_embeddings_says(
    where: str, max_length: int | None, tmp_path: Path
) -> None:
    """Original length 64, factor 4: 256 tokens are covered, 300 are not."""
    fields = architecture(max_position_embeddings=max_length)
    if max_length is None:
        del fields["max_position_embeddings"]
    rope = RopeConfig(scaling="yarn", factor=4.0, original_length=64)
    if where == "checkpoint":
        fields["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        rope = RopeConfig()
    cfg = scratch(rope=rope)
    cfg.architecture = fields
    built = build_model(cfg, 200, torch.float32, 0)
    expected = build_model(scratch(rope=RopeConfig(scaling="yarn", factor=4.0)), 200, torch.float32, 0)
    assert torch.equal(rotary(built.model).inv_freq, rotary(expected.model).inv_freq)
    assert (built.rope.factor, built.rope.original_length, built.rope.max_length) == (4.0, 64, 256)

    again = exported(built, tmp_path / "hf")
    assert torch.equal(rotary(again).inv_freq, rotary(built.model).inv_freq)
    assert rotary(again).attention_scaling == rotary(built.model).attention_scaling
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    # Read by older programs; must say the same.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rope_scaling"]["factor"] == config["rope_parameters"]["factor"] == 4.0
    assert config["rope_scaling"]["original_max_position_embeddings"] == 64

    with pytest.raises(ConfigError, match="300"):
        build_model(cfg, 300, torch.float32, 0)
    with pytest.raises(ConfigError, match="300"):
        build_model(pretrained(tmp_path / "hf"), 300, torch.float32, 0)
    assert build_model(pretrained(tmp_path / "hf"), 256, torch.float32, 0).rope.factor == 4.0


@pytest.mark.parametrize(
    ("scaling", "seq_len", "factor"),
    [("yarn", 65, 2.0), ("yarn", 200, 4.0), ("yarn", 256, 4.0), ("yarn", 257, 5.0), ("linear", 100, 2.0)],
)
def test_factor_follows_from_the_length(scaling: Any, seq_len: int, factor: float) -> None:
    built = build_model(scratch(rope=RopeConfig(scaling=scaling)), seq_len, torch.float32, 0)
    assert (built.rope.factor, built.rope.max_length) == (factor, int(64 * factor))
    assert built.model.config.rope_parameters["factor"] == factor


def test_no_scaling_where_none_is_needed() -> None:
    built = build_model(scratch(rope=RopeConfig(scaling="yarn")), 64, torch.float32, 0)
    plain = build_model(scratch(), 64, torch.float32, 0)
    assert torch.equal(rotary(built.model).inv_freq, rotary(plain.model).inv_freq)
    assert "not needed" in built.notes[0]


def test_linear_keeps_the_length_before_scaling_as_servers_multiply_it(tmp_path: Path) -> None:
    built = build_model(scratch(rope=RopeConfig(scaling="linear")), 200, torch.float32, 0)
    assert built.model.config.max_position_embeddings == 64
    plain = build_model(scratch(), 64, torch.float32, 0)
    assert torch.equal(rotary(built.model).inv_freq, rotary(plain.model).inv_freq / 4.0)
    again = exported(built, tmp_path / "hf")
    assert torch.equal(rotary(again).inv_freq, rotary(built.model).inv_freq)
    assert build_model(pretrained(tmp_path / "hf"), 256, torch.float32, 0).rope.max_length == 256


def test_dynamic_is_fixed_at_the_row(tmp_path: Path) -> None:
    """The frequencies are those that transformers reaches on a whole row; a short document or slice does not move them."""
    built = build_model(scratch(rope=RopeConfig(scaling="dynamic", factor=4.0)), 200, torch.float32, 0)
    rope = {"rope_type": "dynamic", "factor": 4.0}
    reference: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture(rope_scaling=rope)))
    rotary(reference)(torch.zeros(1, 200, 32), torch.arange(200)[None])
    torch.testing.assert_close(rotary(built.model).inv_freq, rotary(reference).inv_freq)
    before = rotary(built.model).inv_freq.clone()
    for length in (5, 100, 200, 7):
        rotary(built.model)(torch.zeros(1, length, 32), torch.arange(length)[None])
    assert torch.equal(before, rotary(built.model).inv_freq)
    again = exported(built, tmp_path / "hf")
    assert torch.equal(rotary(again).inv_freq, before)
    own = build_model(scratch(rope_scaling=rope), 200, torch.float32, 0)
    assert torch.equal(rotary(own.model).inv_freq, before)


def test_longrope_uses_its_long_factors_throughout() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope |= {"original_max_position_embeddings": 32, "factor": 2.0}
    built = build_model(scratch(rope_scaling=rope), 64, torch.float32, 0)
    cos_short = rotary(built.model)(torch.zeros(1, 8, 32), torch.arange(8)[None])[0]
    cos_long = rotary(built.model)(torch.zeros(1, 64, 32), torch.arange(64)[None])[0]
    assert torch.equal(cos_short, cos_long[:, :8])
    assert "longrope" in built.notes[0]


def test_dynamic_within_the_original_length_stays_as_published() -> None:
    built = build_model(scratch(rope_scaling={"rope_type": "dynamic", "factor": 4.0}), 64, torch.float32, 0)
    plain = build_model(scratch(), 64, torch.float32, 0)
    assert torch.equal(rotary(built.model).inv_freq, rotary(plain.model).inv_freq)
    assert (built.rope.kind, built.rope.max_length) == ("dynamic", 256)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_llama3s_own_scaling_stays_or_is_replaced_as_a_whole(tmp_path: Path) -> None:
    fields = {"rope_scaling": LLAMA3, "max_position_embeddings": 128}
    kept = build_model(scratch("llama", **fields), 128, torch.float32, 0)
    assert (kept.rope.kind, kept.rope.max_length) == ("llama3", 128)
    reference: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture("llama", **fields)))
    assert torch.equal(rotary(kept.model).inv_freq, rotary(reference).inv_freq)
    with pytest.raises(ConfigError, match="129"):
        build_model(scratch("llama", **fields), 129, torch.float32, 0)
    replaced = build_model(scratch("llama", RopeConfig(scaling="yarn"), **fields), 256, torch.float32, 0)
    assert replaced.model.config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    }
    assert torch.equal(rotary(exported(replaced, tmp_path / "hf")).inv_freq, rotary(replaced.model).inv_freq)


@pytest.mark.parametrize(
    ("rope", "seq_len", "key", "says"),
    [
        (RopeConfig(), 65, "data.seq_len", "at most 64"),
        (RopeConfig(scaling="none"), 65, "data.seq_len", "scaling=yarn"),
        (RopeConfig(scaling="yarn", factor=3.0), 200, "model.rope.factor", "3.125"),
        (RopeConfig(scaling="linear", factor=2.0), 129, "model.rope.factor", "leave it out to get 3"),
        (RopeConfig(scaling="yarn", factor=0.5), 30, "model.rope.factor", "at least 1"),
        (RopeConfig(factor=4.0), 64, "model.rope.factor", "no factor"),
        (RopeConfig(scaling="none", factor=4.0), 64, "model.rope.factor", "scaling=yarn"),
        (RopeConfig(theta=10000.0), 64, "model.rope.theta", "1000000"),
        (RopeConfig(scaling="yarn", theta=10000.0), 200, "model.rope.theta", "trained with"),
        (RopeConfig(scaling="yarn", original_length=-1), 200, "model.rope.original_length", "at least 1"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    rope: RopeConfig, seq_len: int, key: str, says: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model")
    with pytest.raises(ConfigError, match=says) as caught:
        build_model(pretrained(folder, rope=rope), seq_len, torch.float32, 0)
    assert [fault.key for fault in caught.value.faults] == [key]


def test_all_position_faults_come_at_once(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        build_model(pretrained(folder, rope=RopeConfig(factor=2.0, theta=5.0)), 100, torch.float32, 0)
    assert {fault.key for fault in caught.value.faults} == {
        "model.rope.theta",
        "model.rope.factor",
        "data.seq_len",
    }


def test_scaling_without_a_base_is_refused_or_completed() -> None:
    """transformers would take 10000 in silence."""
    cfg = scratch(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    del cfg.architecture["rope_theta"]
    with pytest.raises(ConfigError, match="rope_theta"):
        build_model(cfg, 200, torch.float32, 0)
    cfg.rope.theta = 1e6
    built = build_model(cfg, 200, torch.float32, 0)
    assert rotary(built.model).inv_freq[1].item() == pytest.approx(0.0079057, rel=1e-4)


def test_positions_by_kind_of_layer_take_no_scaling() -> None:
    with pytest.raises(ConfigError, match="each kind of layer"):
        build_model(scratch("gemma3_text", RopeConfig(scaling="yarn")), 200, torch.float32, 0)


def test_a_buffer_that_was_rounded_is_found() -> None:
    built = build_model(scratch(), 64, torch.bfloat16, 0)
    check_positions(built)
    built.model.bfloat16()
    with pytest.raises(ModelError, match="inv_freq"):
        check_positions(built)
