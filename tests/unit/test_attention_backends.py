"""What is handed to a kernel that this machine cannot run, and what is refused."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from stack.errors import ModelError
from stack.models import spec
from stack.ops.reference import document_attention
from stack.parallel import ulysses
from stack.parallel.ulysses import SETTINGS, AttentionSettings, install_attention, ulysses_attention
from tests.unit.models_rig import SMALL

CU_SEQLENS = torch.tensor([0, 3, 8, 12, 16], dtype=torch.int32)


def model_of(**extra):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **(SMALL | extra)))


def run(model, **kwargs):
    return spec.body(model)(
        input_ids=torch.arange(16).view(2, 8),
        position_ids=torch.arange(8).repeat(2, 1),
        use_cache=False,
        **kwargs,
    ).last_hidden_state


def test_flash_kernels_get_documents_as_one_varlen_row():
    """A stand-in for the kernel sees all rows joined, the boundaries twice, and the longest document."""
    calls = []

    def kernel(module, query, key, value, attention_mask, **kwargs):
        calls.append((module.config._attn_implementation, query.shape, key.shape, attention_mask, kwargs))
        bounds = kwargs["cu_seq_lens_q"]
        out = document_attention(query, key, value, bounds, kwargs["scaling"], kwargs["sliding_window"])
        return out.transpose(1, 2), None

    AttentionInterface.register("flash_stand_in", kernel)
    model = model_of()
    install_attention(spec.attentions(model), model.config, AttentionSettings("flash_stand_in", 1, 0, None))
    got = run(model, cu_seq_lens_q=CU_SEQLENS)
    install_attention(spec.attentions(model), model.config, AttentionSettings("sdpa", 1, 0, None))
    torch.testing.assert_close(got, run(model, cu_seq_lens_q=CU_SEQLENS))
    name, query, key, mask, kwargs = calls[0]
    assert (name, query, key, mask) == ("flash_stand_in", (1, 4, 16, 8), (1, 2, 16, 8), None)
    assert torch.equal(kwargs["cu_seq_lens_q"], CU_SEQLENS) and torch.equal(
        kwargs["cu_seq_lens_k"], CU_SEQLENS
    )
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 5
    assert len(calls) == 2, "one call a layer"


def test_each_rank_hands_on_the_sinks_of_its_own_heads(monkeypatch):
    seen = []

    def kernel(module, query, *args, s_aux, **kwargs):
        seen.append(s_aux)
        return query.transpose(1, 2), None

    AttentionInterface.register("sink_stand_in", kernel)
    monkeypatch.setattr(ulysses, "all_to_all", lambda parts, group: parts)
    module = nn.Module()
    setattr(module, SETTINGS, AttentionSettings("sink_stand_in", 2, 1, cast(Any, object())))
    query, key, sinks = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8), torch.arange(4.0)
    ulysses_attention(module, query, key, key, None, cu_seq_lens_q=CU_SEQLENS, s_aux=sinks)
    assert torch.equal(seen[0], sinks[2:])


def test_two_models_in_one_process_keep_their_own_attention():
    ours, plain = model_of(), model_of()
    want = run(plain)
    install_attention(spec.attentions(ours), ours.config, AttentionSettings("sdpa", 1, 0, None))
    assert torch.equal(run(plain), want), "a model not asked for is untouched"
    whole_rows = torch.tensor([0, 8, 16], dtype=torch.int32)
    torch.testing.assert_close(run(ours, cu_seq_lens_q=whole_rows), want)


def test_running_without_boundaries_is_refused():
    model = model_of()
    install_attention(spec.attentions(model), model.config, AttentionSettings("sdpa", 1, 0, None))
    with pytest.raises(ModelError, match="documents cannot be kept apart"):
        run(model)


def call(backend="sdpa", mask=None, **kwargs):
    module = nn.Module()
    setattr(module, SETTINGS, AttentionSettings(backend, 1, 0, None))
    query, key = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    return ulysses_attention(module, query, key, key, mask, cu_seq_lens_q=CU_SEQLENS, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(mask=torch.ones(1, 1, 16, 16, dtype=torch.bool)), "mask of its own"),
        (dict(softcap=30.0), "softcap"),
        (dict(s_aux=torch.zeros(4)), "s_aux"),
        (dict(position_bias=torch.zeros(1)), "position_bias"),
        (dict(is_causal=False), "not causal"),
        (dict(backend="flex_attention", dropout=0.1), "dropout"),
    ],
)
def test_what_a_backend_cannot_compute_is_refused(kwargs, message):
    with pytest.raises(ModelError, match=message):
        call(**kwargs)
