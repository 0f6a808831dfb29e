"""What every model family owes: it equals transformers' own model, is described rightly, and survives an export.

A new family gets a line in FAMILIES of tests/unit/models_rig.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from stack.checkpoint.export_hf import export_hf
from stack.errors import ConfigError
from stack.models import spec
from stack.models.build import build_model, fill_model, prepare_model
from stack.models.safetensors_file import Entry
from tests.unit.models_rig import FAMILIES, architecture, logits, plain_model, pretrained, saved, scratch

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pretrained_equals_transformers(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", family, dtype, tie_word_embeddings=tied)
    built = build_model(pretrained(folder), 32, dtype, seed=0)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert torch.equal(logits(built.model), logits(reference))
    own, other = dict(built.model.named_parameters()), dict(reference.named_parameters())
    assert list(own) == list(other)
    assert all(own[name].dtype == dtype and torch.equal(own[name], other[name]) for name in own)
    for name, buffer in reference.named_buffers():
        mine = built.model.get_buffer(name)
        assert mine.dtype == buffer.dtype and torch.equal(mine, buffer), name
    assert built.spec.tied is tied
    assert (spec.head(built.model).weight is built.model.get_input_embeddings().weight) is tied


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_read_back_bit_equal(family: str, tied: bool, tmp_path: Path) -> None:
    built = build_model(scratch(family, tie_word_embeddings=tied), 32, torch.bfloat16, seed=3)
    export_hf(built, built.model.named_parameters(), tmp_path / "hf", torch.bfloat16, shard_bytes=3000)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    again, info = loaded
    assert not any(info.values()), info
    assert again.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(built.model))


@pytest.mark.parametrize("family", FAMILIES)
def test_accessors_and_numbers(family: str) -> None:
    built = build_model(scratch(family), 32, torch.float32, seed=0)
    model, known = built.model, built.spec
    assert (known.num_layers, known.hidden, known.vocab) == (2, 32, 64)
    assert (known.num_heads, known.num_kv_heads, known.head_dim) == (4, 2, 8)
    assert len(spec.blocks(model)) == len(spec.attentions(model)) == len(spec.mlps(model)) == 2
    assert known.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    hidden = spec.body(model)(input_ids=torch.arange(6)[None], use_cache=False).last_hidden_state
    expected = spec.head(model)(hidden) * known.logit_scale
    torch.testing.assert_close(expected, model(input_ids=torch.arange(6)[None], use_cache=False).logits)
    assert known.windows == {"mistral": (16, 16), "gemma3_text": (16, None)}.get(family, (None, None))
    assert known.logit_scale == (0.125 if family == "granite" else 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_boundaries_reach_the_attention_and_replacing_it_replaces_all_of_it(family: str) -> None:
    seen: list[dict[str, Any]] = []

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(kwargs | {"mask": mask, "module": module})
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("contract_test", record)
    model = build_model(scratch(family), 32, torch.float32, seed=0).model
    model.config._attn_implementation = "contract_test"
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    ids = torch.arange(6)[None]
    spec.body(model)(
        input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds
    )
    assert [call["module"] for call in seen] == spec.attentions(model)
    assert all(call["cu_seq_lens_q"] is bounds and call["mask"] is None for call in seen)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_module_at_a_time(family: str) -> None:
    """When `partition` takes a module's parameters away, no others have memory: not before it, not after."""
    rest: list[int] = []

    def partition(module: torch.nn.Module) -> None:
        own = list(module.parameters(recurse=False))
        assert own and not any(parameter.is_meta for parameter in own)
        alive = {id(p): p.numel() for p in model.parameters() if not p.is_meta}
        rest.append(sum(alive.values()) - sum(p.numel() for p in own))
        for parameter in own:
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    blank = prepare_model(scratch(family, tie_word_embeddings=True), 32, torch.bfloat16, seed=0)
    model = blank.built.model
    fill_model(blank, partition)
    assert len(rest) > 8 and set(rest) == {0}
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def test_a_rank_that_does_not_read_gets_its_values_through_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe")
    sent: list[torch.Tensor] = []
    reader = build_model(
        pretrained(folder), 32, torch.float32, 0, lambda m: sent.extend(m.parameters(recurse=False))
    )

    def receive(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data.copy_(sent.pop(0))

    def refuse(entry: Entry) -> torch.Tensor:
        raise AssertionError(f"{entry} was read")

    monkeypatch.setattr(Entry, "read", refuse)
    other = build_model(pretrained(folder), 32, torch.float32, 1, receive, reads_weights=False)
    assert not sent
    assert torch.equal(logits(reader.model), logits(other.model))


def test_gemma2_soft_cap_is_known_and_needs_a_flash_kernel() -> None:
    cfg = scratch("qwen3")
    cfg.architecture = architecture("qwen3") | {"model_type": "gemma2", "final_logit_softcapping": 20.0}
    cfg.architecture.pop("bos_token_id")
    with pytest.raises(ConfigError, match="softcap"):
        build_model(cfg, 32, torch.float32, 0)
    cfg.attention = "flash_attention_2"
    built = build_model(cfg, 32, torch.float32, 0)
    assert (built.spec.softcap, built.spec.attention_extras) == (20.0, ("softcap",))


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_sinks_need_a_kernel_that_the_model_knows(attention: str) -> None:
    """transformers drops them without a word before a kernel that does not take them."""
    cfg = scratch("qwen3")
    cfg.architecture = architecture("qwen3") | {"model_type": "granite_swa"}
    cfg.attention = attention
    with pytest.raises(ConfigError, match=r"needs s_aux. Fix: model.attention=kernels-community/"):
        build_model(cfg, 32, torch.float32, 0)
    cfg.attention = "kernels-community/vllm-flash-attn3"
    assert build_model(cfg, 32, torch.float32, 0).spec.attention_extras == ("s_aux",)


def test_plain_model_really_is_moved_off_its_initial_values() -> None:
    model = plain_model("qwen3", torch.float32)
    assert not torch.equal(model.model.norm.weight, torch.ones(32))
