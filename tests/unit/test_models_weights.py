"""Loading weights: everything that does not fit is named before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stack.errors import ModelError
from stack.models.build import build_model, prepare_model
from stack.models.safetensors_file import read_headers
from tests.unit.models_rig import logits, plain_model, pretrained, saved, scratch

Change = Callable[[dict[str, torch.Tensor]], None]


def change_weights(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop(*names: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, tensor: torch.Tensor) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensor

    return change


EMBEDDING = "model.embed_tokens.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("qwen3", drop(NORM, "lm_head.weight"), [f"missing: {NORM}", "missing: lm_head.weight"]),
        ("qwen3", put("model.layers.2.extra", torch.ones(1)), ["unexpected: model.layers.2.extra"]),
        (
            "qwen3",
            put(NORM, torch.ones(31)),
            [f"mis-shaped: {NORM} is [31] in the folder and [32] in the model"],
        ),
        ("qwen3", put("model.norm.weight", torch.ones(1)), ["mis-shaped: model.norm.weight"]),
        (
            "qwen3_moe",
            drop("model.layers.0.mlp.experts.1.down_proj.weight"),
            ["mlp.experts.down_proj is [3, 32, 24]"],
        ),
        (
            "qwen3_moe",
            drop("model.layers.0.mlp.experts.1.up_proj.weight"),
            ["incomplete: ", "mlp.experts.gate_up_proj"],
        ),
        (
            "qwen3_moe",
            put("model.layers.0.mlp.experts.4.down_proj.weight", torch.ones(32, 24)),
            ["experts.down_proj is [5, 32, 24]"],
        ),
    ],
)
def test_what_does_not_fit_is_named(family: str, change: Change, says: list[str], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", family)
    change_weights(folder, change)
    for reads_weights in (True, False):
        with pytest.raises(ModelError) as caught:
            prepare_model(pretrained(folder), 32, torch.float32, 0, reads_weights)
        assert all(part in str(caught.value) for part in says), caught.value


def test_all_faults_of_a_folder_come_at_once(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        drop(NORM)(tensors)
        put("other.weight", torch.ones(2))(tensors)
        put("model.norm.weight", torch.ones(2))(tensors)

    change_weights(folder, change)
    with pytest.raises(ModelError, match=r"(?s)mis-shaped.*missing.*unexpected"):
        prepare_model(pretrained(folder), 32, torch.float32, 0)


def test_weights_of_another_config(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    with pytest.raises(ModelError, match=r"unexpected: model.layers.1"):
        prepare_model(pretrained(folder), 32, torch.float32, 0)


@pytest.mark.parametrize("equal", [True, False])
def test_a_trained_head_is_not_dropped_for_a_tie(equal: bool, tmp_path: Path) -> None:
    """Whether the weights come from the model's folder or, by checkpoint.weights_from, from another."""
    folder = saved(tmp_path / "model", tie_word_embeddings=False)
    if equal:
        change_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    given = scratch(tie_word_embeddings=True)
    for cfg, weights in ((pretrained(folder), None), (given, read_headers(folder))):
        if equal:
            prepare_model(cfg, 32, torch.float32, 0, weights=weights)
            continue
        with pytest.raises(ModelError, match=r"lm_head\.weight.*differ.*tie_word_embeddings=false"):
            prepare_model(cfg, 32, torch.float32, 0, weights=weights)


def test_left_overs_that_transformers_ignores_are_ignored(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    change_weights(folder, put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)))
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(build_model(pretrained(folder), 32, torch.float32, 0).model), logits(reference))


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("breakage", "says"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.init=scratch"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "save_pretrained",
        ),
        (lambda folder: _truncate(folder / "model.safetensors"), "truncated"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"text, no tensors"),
            "not a safetensors file",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "not a safetensors file"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "quen3"}'), "quen3"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone.safetensors"}}'
            ),
            "gone.safetensors",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model.safetensors"}}'
            ),
            "do not hold: a",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
            "not a safetensors index",
        ),
    ],
)
def test_broken_folders(breakage: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    breakage(folder)
    with pytest.raises(ModelError, match=says):
        prepare_model(pretrained(folder), 32, torch.float32, 0)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    change_weights(folder, put("model.norm.weight", torch.ones(32, dtype=torch.float8_e4m3fn)))
    with pytest.raises(ModelError, match="quantised"):
        prepare_model(pretrained(folder), 32, torch.float32, 0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("published_form", [True, False], ids=["published", "own"])
def test_shards_and_both_forms_of_names(family: str, published_form: bool, tmp_path: Path) -> None:
    model = plain_model(family, torch.float32)
    model.save_pretrained(tmp_path / "model", max_shard_size="10KB", save_original_format=published_form)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    names = set(read_headers(tmp_path / "model"))
    apart = any(".experts.0." in name for name in names)
    assert apart is (family == "qwen3_moe" and published_form)
    assert torch.equal(
        logits(build_model(pretrained(tmp_path / "model"), 32, torch.float32, 0).model), logits(model)
    )


def test_more_than_ten_experts_keep_their_order(tmp_path: Path) -> None:
    model = plain_model("qwen3_moe", torch.float32, num_experts=12)
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(
        logits(build_model(pretrained(tmp_path / "model"), 32, torch.float32, 0).model), logits(model)
    )


def test_a_type_other_than_the_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    wide = build_model(pretrained(folder), 32, torch.float32, 0).model
    assert torch.equal(
        logits(wide), logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    )


def test_a_tied_head_under_either_name_or_both(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", tie_word_embeddings=True)
    expected = logits(AutoModelForCausalLM.from_pretrained(folder))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, put("lm_head.weight", embedding.clone()))
    assert torch.equal(logits(build_model(pretrained(folder), 32, torch.float32, 0).model), expected)
    change_weights(folder, drop("model.embed_tokens.weight"))
    assert torch.equal(logits(build_model(pretrained(folder), 32, torch.float32, 0).model), expected)
    change_weights(folder, put("model.embed_tokens.weight", embedding + 1))
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        build_model(pretrained(folder), 32, torch.float32, 0)


def test_reading_gives_every_type_shape_and_value(tmp_path: Path) -> None:
    tensors = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(7).bfloat16(),
        "double": torch.randn(2, 2, 2, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    entries = read_headers(tmp_path)
    for name, tensor in tensors.items():
        found = entries[name].read()
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor)
        assert entries[name].like().shape == tensor.shape
