"""The exported folder: complete or absent, each tensor once, read by transformers with equal logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from stack.checkpoint import export_hf as module
from stack.checkpoint.export_hf import export_hf
from stack.errors import CheckpointError
from stack.models.build import BuiltModel, build_model
from stack.models.safetensors_file import read_headers
from tests.unit.models_rig import logits, pretrained, saved, scratch


def build(family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> BuiltModel:
    return build_model(scratch(family, **changes), 32, dtype, seed=1)


def export(built: BuiltModel, folder: Path, shard_bytes: int = 2**30) -> None:
    export_hf(built, built.model.named_parameters(), folder, built.model.dtype, shard_bytes=shard_bytes)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_tied_head_is_stored_once(tied: bool, tmp_path: Path) -> None:
    built = build(tie_word_embeddings=tied)
    export(built, tmp_path / "hf")
    names = set(read_headers(tmp_path / "hf"))
    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) is not tied
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is tied


def test_equal_after_training(tmp_path: Path) -> None:
    """A tied head stays the embedding through optimizer steps and the export."""
    built = build(tie_word_embeddings=True)
    optimizer = torch.optim.SGD(built.model.parameters(), lr=0.5)
    ids = torch.arange(12)[None]
    for _ in range(3):
        built.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    export(built, tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)
    assert torch.equal(logits(again), logits(built.model))


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    built = build()
    export(built, tmp_path / "hf", shard_bytes=20_000)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    sizes = [parameter.numel() * 4 for parameter in built.model.parameters()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(file.stat().st_size < 20_000 + 4000 for file in files)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(logits(again), logits(built.model))


def test_no_more_than_a_shard_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    save = safetensors.torch.save_file

    def count(tensors: dict[str, Tensor], *args: object, **kwargs: object) -> None:
        written.append(sum(tensor.numel() * 4 for tensor in tensors.values()))
        save(tensors, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "save_file", count)
    built = build()
    pulled: list[int] = []

    def parameters() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in built.model.named_parameters():
            pulled.append(parameter.numel() * 4)
            assert sum(pulled) - sum(written) <= 20_000 + pulled[-1]
            yield name, parameter

    export_hf(built, parameters(), tmp_path / "hf", torch.float32, shard_bytes=20_000)
    assert sum(written) == sum(pulled) and max(written) <= 20_000


def test_experts_are_apart_as_servers_expect(tmp_path: Path) -> None:
    export(build("qwen3_moe"), tmp_path / "hf")
    entries = read_headers(tmp_path / "hf")
    assert entries["model.layers.0.mlp.experts.3.gate_proj.weight"].shape == (24, 32)
    assert not any("gate_up_proj" in name for name in entries)


def test_the_type_of_the_files_is_that_of_the_config(tmp_path: Path) -> None:
    built = build(dtype=torch.bfloat16)
    master = ((name, parameter.detach().float()) for name, parameter in built.model.named_parameters())
    export_hf(built, master, tmp_path / "hf", torch.bfloat16)
    assert {entry.dtype for entry in read_headers(tmp_path / "hf").values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["Qwen3ForCausalLM"])
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")), logits(built.model))


def test_private_attention_names_stay_private(tmp_path: Path) -> None:
    built = build()
    built.model.config._attn_implementation = "stack_ulysses"
    export(built, tmp_path / "hf")
    assert "stack_ulysses" not in (tmp_path / "hf" / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config._attn_implementation == "sdpa"


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<end>": 0} | {chr(97 + index): index + 1 for index in range(26)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])),
        eos_token="<end>",
        pad_token="<end>",
    )


def test_tokenizer_and_end_of_text(tmp_path: Path) -> None:
    built = build(eos_token_id=None, bos_token_id=None)
    export_hf(built, built.model.named_parameters(), tmp_path / "hf", torch.float32, make_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode("abc") == [1, 2, 3]
    generation = GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (generation.eos_token_id, generation.pad_token_id) == (0, 0)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert again.config.eos_token_id == 0
    assert again.config.pad_token_id is None  # with one, the embedding's row would get no gradient


def test_the_models_own_generation_config_is_kept(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    published = '{"eos_token_id": [2, 5], "temperature": 0.6, "top_p": 0.9}'  # sampling without do_sample: saving refuses
    (folder / "generation_config.json").write_text(published)
    built = build_model(pretrained(folder), 32, torch.float32, 0)
    assert built.model.generation_config is not None and built.model.generation_config.eos_token_id == [2, 5]
    export(built, tmp_path / "hf")
    assert (tmp_path / "hf" / "generation_config.json").read_text() == published


def test_an_earlier_export_is_replaced_whole(tmp_path: Path) -> None:
    export(build(), tmp_path / "hf", shard_bytes=20_000)
    export(build("llama"), tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 1
    assert not (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["thesis.txt"], "thesis.txt"),
        (["config.json", "thesis.txt"], "thesis.txt"),
        (["config.json", "model.safetensors", "README.md"], "README.md"),
        (["config.json", "model.safetensors", "checkpoints/step_000001"], "checkpoints/"),
        (["config.json", "tokenizer.json"], "not config.json with weights"),
        (["model.safetensors"], "not config.json with weights"),
    ],
)
def test_other_folders_are_not_touched(files: list[str], says: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{says}.*not overwritten.*out=FOLDER"):
        export(build(), folder)
    assert tree(tmp_path) == before
    with pytest.raises(CheckpointError, match="is a file: it is not overwritten"):
        export(build(), folder / files[0] if "/" not in files[0] else folder)


def test_folders_in_use_are_not_replaced(tmp_path: Path) -> None:
    """Although they look like an earlier export."""
    built = build_model(pretrained(saved(tmp_path / "run" / "model")), 32, torch.float32, 0)
    before = tree(tmp_path)
    for folder, protected in [
        ("run/model", []),
        ("run/model", [tmp_path / "run/model/config.json"]),
        ("run", []),
    ]:
        parameters = built.model.named_parameters()
        with pytest.raises(CheckpointError, match="in use: it is not overwritten"):
            export_hf(built, parameters, tmp_path / folder, torch.float32, protected=protected)
    assert tree(tmp_path) == before


def test_of_a_linked_export_only_the_link_is_replaced(tmp_path: Path) -> None:
    export(build(), tmp_path / "elsewhere")
    before = tree(tmp_path / "elsewhere")
    (tmp_path / "hf").symlink_to(tmp_path / "elsewhere")
    export(build("llama"), tmp_path / "hf")
    assert tree(tmp_path / "elsewhere") == before and not (tmp_path / "hf").is_symlink()


@pytest.mark.parametrize(
    "fault", ["full disk", "lost parameter", "shard in place of a tensor", "unknown name"]
)
def test_a_failed_export_leaves_nothing_and_keeps_gathering(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build()
    export(built, tmp_path / "hf")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    pulled: list[str] = []

    def parameters() -> Iterator[tuple[str, Tensor]]:
        for index, (name, parameter) in enumerate(built.model.named_parameters()):
            pulled.append(name)
            if fault == "lost parameter" and index == 1:
                continue
            value = torch.empty(0) if fault == "shard in place of a tensor" and index == 1 else parameter
            yield ("odd.weight" if fault == "unknown name" and index == 1 else name), value

    if fault == "full disk":

        def fail(*args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(CheckpointError):
        export_hf(built, parameters(), tmp_path / "hf", torch.float32, shard_bytes=5_000)
    assert len(pulled) == len(list(built.model.parameters()))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before


def test_other_ranks_only_gather(tmp_path: Path) -> None:
    built = build()
    pulled: list[str] = []

    def parameters() -> Iterator[tuple[str, None]]:
        for name, _ in built.model.named_parameters():
            pulled.append(name)
            yield name, None

    export_hf(built, parameters(), tmp_path / "hf", torch.float32, writes=False)
    assert len(pulled) == len(built.shapes)
    assert not list(tmp_path.iterdir())
