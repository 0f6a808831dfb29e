"""A whole run on chats: only what the assistant says is learned, and the model is exported with the template it was
trained by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from stack.checkpoint.export_run import Request, export_run
from stack.data.store import TokenStore
from stack.errors import CheckpointError
from tests.e2e.test_run_plain import one_process_group, start_folder, train
from tests.unit.chat_rig import FAMILIES

__all__ = ["one_process_group", "start_folder"]  # fixtures
FAMILY = FAMILIES["llama"]


def write_chats() -> list[str]:
    """60 questions whose answer hangs on nothing, with the answer they all get; and the settings to train on them."""
    turns = [
        [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": "The answer is here."},
        ]
        for number in range(60)
    ]
    Path("c.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    FAMILY.save(Path("tokenizer"), post_bos=True)
    Path("own.jinja").write_text(FAMILY.marked)
    settings = ["data=chat", "data.path=c.jsonl", "model.tokenizer=tokenizer", "data.chat_template=own.jinja"]
    return [
        *settings,
        "model.architecture.vocab_size=512",
        "data.eval_fraction=0",
        "data.seq_len=64",
        "optim.lr=1e-2",
    ]


def loss_of(folder: Path, learned: bool) -> float:
    """Mean loss of the exported model on one chat, over what is learned of it or over what is not, in nats a token."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt, answer = (
        "<|begin|><|start_header_id|>user<|end_header_id|>\n\nWhat is 7?<|eot_id|>",
        "The answer is here.<|eot_id|>",
    )
    prompt += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    parts = [
        tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        for text in (prompt, answer)
    ]
    ids = torch.cat(parts, dim=1)
    with torch.no_grad():
        losses = F.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")
    length = parts[0].shape[1] - 1
    return float((losses[length:] if learned else losses[:length]).mean())


def test_only_answers_are_learned_and_the_template_goes_with_the_model() -> None:
    settings = write_chats()
    records = train(
        "name=a", *settings, "schedule.steps=40", "checkpoint.export=true", "checkpoint.final=true"
    )
    store = TokenStore(next(Path("data").glob("jsonl-*/store.json")).parent)
    mask = store.read_targets(0, store.num_tokens)
    assert mask is not None and 60 < mask.sum() < len(mask) / 2
    epoch = next(record for record in records if record["tokens_total"] == store.num_tokens)
    assert epoch["targets_total"] == mask.sum()
    assert records[-1]["loss"] < 0.5 < 5 < records[0]["loss"]
    exported = Path("runs/a/hf")
    assert loss_of(exported, learned=True) < 0.5 and loss_of(exported, learned=False) > 4
    again = export_run(Request(Path("runs/a").resolve()), tell=lambda _: None)
    for folder in (exported, again):
        assert AutoTokenizer.from_pretrained(folder).chat_template == FAMILY.marked
    with pytest.raises(CheckpointError, match=r"data\.loss_on"):
        train("name=a", *settings, "schedule.steps=41", "data.loss_on=all")
