"""Chats from the file to the labels of a step, and the template to the folder that is served."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from stack.config.chat_checks import chat_faults
from stack.config.schema import RunConfig
from stack.config.schema_data import DataConfig, MixturePart
from stack.data.batch import IGNORE
from stack.data.chat.encode import ChatEncoder, Encoded, Skipped
from stack.data.loader import Loader
from stack.data.prepare import ensure_stores
from stack.data.store import TokenStore
from stack.errors import DataError
from stack.train.exporting import run_tokenizer
from tests.unit.chat_rig import FAMILIES, Turns, random_turns

FAMILY = FAMILIES["llama"]


def make(folder: Path, records: list[Any], tokenizer: str, **data: Any) -> tuple[DataConfig, TokenStore]:
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {
        "source": "jsonl", "format": "messages", "path": str(file), "store": str(folder / "store"), "seq_len": 256,
        "packing": "best_fit", "too_long": "drop", "eval_fraction": 0.0, "prepare_workers": 0, **data,
    }  # fmt: skip
    config = DataConfig(**settings)
    (made,) = ensure_stores(config, tokenizer_path=tokenizer, model_vocab=None, seed=1, say=lambda _: None)
    return config, TokenStore(made)


def conversations(count: int) -> list[Turns]:
    source = random.Random(5)
    return [random_turns(source, False) for _ in range(count)]


def said(turns: Turns) -> list[str]:
    """What is learned of a conversation, a turn each."""
    return [text for text, is_target in FAMILY.pieces(turns) if is_target]


@pytest.mark.parametrize("workers", [0, 2])
def test_labels_of_an_epoch_are_what_the_assistants_say(tmp_path: Path, workers: int) -> None:
    tokenizer = FAMILY.save(tmp_path / "tokenizer", post_bos=True, pad="<|eot_id|>")
    given = conversations(60)
    data, store = make(tmp_path, [{"messages": turns} for turns in given], tokenizer, prepare_workers=workers)
    spoken = [turns for turns in given if said(turns)]
    assert store.num_documents == len(spoken) < 60
    assert store.info.dropped["no assistant turn"]["count"] == 60 - len(spoken)
    loader = Loader(store, data, dp=1, dp_rank=0, accumulation=1, seed=3, epochs=1)
    decoder = AutoTokenizer.from_pretrained(tokenizer)
    found: Counter[str] = Counter()
    num_targets = 0
    while (batches := loader.next_step()) is not None:
        for batch in batches:
            num_targets += batch.num_targets
            for labels in batch.labels.tolist():
                for is_target, run in itertools.groupby(labels, key=lambda label: label != IGNORE):
                    if is_target:
                        found.update(
                            part + "<|eot_id|>" for part in decoder.decode(list(run)).split("<|eot_id|>")[:-1]
                        )
    assert found == Counter(text for turns in spoken for text in said(turns))
    mask = store.read_targets(0, store.num_tokens)
    assert mask is not None and num_targets == mask.sum() < store.num_tokens


def test_a_corpus_without_anything_to_learn_is_an_error_that_names_the_cause(tmp_path: Path) -> None:
    tokenizer = FAMILY.save(tmp_path / "tokenizer")
    asked = [{"messages": [{"role": "user", "content": "x"}]}] * 3
    with pytest.raises(
        DataError, match=r"no record has anything to learn \(no assistant turn: 3\).*data\.messages_field"
    ):
        make(tmp_path, asked, tokenizer)
    with pytest.raises(DataError, match=r"missing field: 2.*other fields than data\.format=messages"):
        make(tmp_path, [{"text": "x"}] * 2, tokenizer, bad_text="skip")


def test_a_bad_record_stops_with_its_line_or_is_counted(tmp_path: Path) -> None:
    tokenizer = FAMILY.save(tmp_path / "tokenizer")
    good = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    records = [good, {"messages": [{"role": "robot", "content": "x"}]}, good, {"messages": []}]
    with pytest.raises(
        DataError, match=r"chats\.jsonl, line 2.*has role 'robot', expected one of.*bad_text=skip"
    ):
        make(tmp_path, records, tokenizer)
    _, store = make(tmp_path, records, tokenizer, bad_text="skip")
    assert {reason: entry["count"] for reason, entry in store.info.dropped.items()} == {
        "unknown role": 1,
        "no messages": 1,
    }
    assert store.num_documents == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_forged_control_tokens_and_empty_answers_are_told(tmp_path: Path, workers: int) -> None:
    def chat(asked: str, answer: str, **more: Any) -> dict[str, Any]:
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer, **more}]
        return {"messages": turns}

    records = [
        chat("q", "a"), chat("q", "one<|eot_id|>two"), chat("<|start_header_id|>", "a"), chat("q", " "),
        chat("q", "<eot>"), {"messages": chat("q", "", weight=0)["messages"] + chat("q", "a")["messages"]},
    ]  # fmt: skip
    tokenizer = FAMILY.save(tmp_path / "tokenizer")
    _, store = make(tmp_path, records, tokenizer, prepare_workers=workers)
    assert store.num_documents == len(records)
    notes = [note for note in store.info.notes if " records " in note]
    assert len(notes) == 2
    assert notes[0].startswith("2 records whose content spells out control tokens") and "line 2" in notes[0]
    assert notes[1].startswith("1 records with an empty answer") and "line 4" in notes[1]
    encoder = ChatEncoder(tokenizer, DataConfig(format="prompt_completion"))
    for prompt, completion, count in (
        ("q", "a", 0),
        ("q<|begin|>", "a", 1),
        ("q", "", 1),
        ("q", "<|end|>", 1),
    ):
        found = encoder.encode({"prompt": prompt, "completion": completion})
        assert isinstance(found, Encoded) and len(found.remarks) == count


def test_another_template_or_target_makes_another_store(tmp_path: Path) -> None:
    tokenizer = FAMILY.save(tmp_path / "tokenizer")
    (tmp_path / "marked.jinja").write_text(FAMILY.marked)
    records = [{"messages": turns} for turns in conversations(5)]
    settings: list[dict[str, Any]] = [
        {},
        {"loss_on": "last"},
        {"chat_template": str(tmp_path / "marked.jinja")},
    ]
    assert len({make(tmp_path, records, tokenizer, **each)[1].folder for each in settings}) == 3


@pytest.mark.parametrize("form", ["messages", "prompt_completion"])
def test_plain_completions_and_the_end_of_text(tmp_path: Path, form: str) -> None:
    """Prompt and completion as text: BOS before, end of text behind, and only the completion learned."""
    tokenizer = FAMILY.save(tmp_path / "tokenizer", post_bos=True)
    decoder = AutoTokenizer.from_pretrained(tokenizer)
    record = {"prompt": "Q: a\nA:", "completion": " b"}
    if form == "messages":
        record = {"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "old"}],
                  "completion": [{"role": "assistant", "content": "new"}]}  # fmt: skip
    if form != "messages":  # a template that serves no chat is none of its business
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    _, store = make(tmp_path, [record], tokenizer, format="prompt_completion")
    ids, mask = store.read(0, store.num_tokens), store.read_targets(0, store.num_tokens)
    assert mask is not None
    assert decoder.decode(ids[mask].tolist()) == (
        " b<|end|>" if form == "prompt_completion" else "new<|eot_id|>"
    )
    assert (ids == decoder.bos_token_id).sum() == 1 and ids[0] == decoder.bos_token_id


def test_a_target_that_nothing_comes_before_is_none(tmp_path: Path) -> None:
    tokenizer = FAMILY.save(tmp_path / "tokenizer")
    encoder = ChatEncoder(tokenizer, DataConfig(format="prompt_completion", append_eos=False))
    for completion in ("", "a"):
        assert encoder.encode({"prompt": "", "completion": completion}) == Skipped("nothing to learn")


@pytest.mark.parametrize("by_file", [False, True])
def test_the_exported_tokenizer_has_the_template_of_the_training(tmp_path: Path, by_file: bool) -> None:
    folder = FAMILY.save(tmp_path / "tokenizer", post_bos=True)
    other = FAMILY.template.replace("{{- bos_token }}\n", "").replace("m['role'] +", "m['role'] | upper +")
    other = other.replace("<|start_header_id|>assistant<", "<|start_header_id|>ASSISTANT<")
    (tmp_path / "own.jinja").write_text(other)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    data, store = make(
        tmp_path,
        [{"messages": turns}],
        folder,
        chat_template=str(tmp_path / "own.jinja") if by_file else None,
    )
    cfg = RunConfig(data=data)
    cfg.model.tokenizer = folder
    run_tokenizer(cfg, store).save_pretrained(tmp_path / "export")
    served = AutoTokenizer.from_pretrained(tmp_path / "export")
    asked = served.apply_chat_template(
        turns[:1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ids = store.read(0, store.num_tokens).tolist()
    assert ids[: len(asked)] == asked, "a server asks in the tokens that were learned behind"
    assert ("ASSISTANT" in served.decode(asked)) == by_file
    assert served.decode(ids[len(asked) :]) == "a<|eot_id|>" and ids.count(served.bos_token_id) == 1


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"format": "messages", "source": "text", "path": "x"}, "data.format"),
        ({"format": "messages", "source": "jsonl", "train_tokenizer": True}, "data.train_tokenizer"),
        ({"format": "messages", "source": "jsonl", "chat_template": "nowhere.jinja"}, "data.chat_template"),
        ({"chat_template": "conf/chat/qwen3.jinja"}, "data.chat_template"),
        ({"source": "jsonl", "mixture": [MixturePart(name="a", source="random", format="alpaca")]}, "data.mixture.a.format"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(settings: dict[str, Any], key: str) -> None:
    assert [fault.key for fault in chat_faults(DataConfig(**settings))] == [key]


def test_settings_that_serve() -> None:
    for form in ("messages", "sharegpt", "alpaca", "prompt_completion"):
        assert not list(
            chat_faults(DataConfig(source="jsonl", format=form, chat_template="conf/chat/qwen3.jinja"))
        )
    mixed = [MixturePart(name="a", format="messages"), MixturePart(name="b", source="stdlib")]
    assert not list(
        chat_faults(DataConfig(source="jsonl", chat_template="conf/chat/qwen3.jinja", mixture=mixed))
    )
