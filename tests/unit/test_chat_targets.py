"""What is learned of a conversation: exactly what its assistant turns say, each with its closing token, whatever the
template, the tokenizer and the text. The expected pieces are written down in `chat_rig.py`, without Jinja."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stack.config.schema_data import DataConfig
from stack.data.chat.encode import BadRecord, ChatEncoder, Skipped
from stack.errors import ConfigError
from tests.unit.chat_rig import (
    ALPHABET,
    ASKED,
    FAMILIES,
    SAID,
    Family,
    Make,
    Pieces,
    decoded,
    encode,
    learned,
    maker,
    random_turns,
)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return maker(tmp_path)


def expected_ids(tokenizer: PreTrainedTokenizerBase, pieces: Pieces) -> list[int]:
    """Prompt and answer each tokenised by itself, as a server and a model make them."""
    runs = [
        "".join(text for text, _ in run) for _, run in itertools.groupby(pieces, key=lambda piece: piece[1])
    ]
    return [token for text in runs for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def merged(pieces: Pieces) -> list[str]:
    """Runs of learned text: turns with nothing between them are one run."""
    runs = itertools.groupby((piece for piece in pieces if piece[0]), key=lambda piece: piece[1])
    return ["".join(text for text, _ in run) for is_target, run in runs if is_target]


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations(make: Make, name: str, marked: bool) -> None:
    family = FAMILIES[name]
    encoder = make(family, marked)
    tokenizer = encoder.text.tokenizer
    source = random.Random(f"{name} {marked}")
    kept = 0
    for _ in range(150):
        turns = random_turns(source, family.alternates)
        pieces = family.pieces(turns)
        if not any(is_target for _, is_target in pieces):
            assert encoder.encode({"messages": turns}) == Skipped("no assistant turn")
            continue
        kept += 1
        made = encode(encoder, turns)
        assert learned(encoder, made) == merged(pieces), turns
        assert decoded(encoder, made.ids) == "".join(text for text, _ in pieces)
        assert made.ids.tolist() == expected_ids(tokenizer, pieces), turns
        blank = any(turn["content"][:1].isspace() for turn in turns if turn["role"] == "assistant")
        if name != "llama" and not blank:  # else a header's blank line and what follows are tokens of both
            whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
            assert made.ids.tolist() == whole, "what the library would make of it"
    assert kept > 80


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_last_turn_and_all_turns(make: Make, loss_on: str, marked: bool) -> None:
    for name, family in FAMILIES.items():
        encoder = make(family, marked, loss_on=loss_on)
        source = random.Random(name)
        for _ in range(40):
            turns = random_turns(source, family.alternates)
            pieces = family.pieces(turns)
            if loss_on == "all":
                made = encode(encoder, turns)
                assert made.targets.all() and decoded(encoder, made.ids) == "".join(p for p, _ in pieces)
            elif any(is_target for _, is_target in pieces):
                assert learned(encoder, encode(encoder, turns)) == [
                    [text for text, is_target in pieces if is_target][-1]
                ]


@pytest.mark.parametrize("marked", [False, True])
def test_a_turn_of_weight_0_is_context(make: Make, marked: bool) -> None:
    turns = [ASKED, {"role": "assistant", "content": "wrong", "weight": 0}, ASKED, {**SAID, "weight": 1}]
    encoder = make(FAMILIES["mistral"], marked)
    assert learned(encoder, encode(encoder, turns)) == [" The answer.</s>"]
    assert encoder.encode({"messages": turns[:2]}) == Skipped("no assistant turn")


def test_header_that_joins_with_the_content_is_cut_from_it(make: Make) -> None:
    """The tokenizer has a token for a blank line; half of it would be header."""
    encoder = make(FAMILIES["chatml"])
    tokenizer = encoder.text.tokenizer
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    made = encode(encoder, [ASKED, {"role": "assistant", "content": "\none"}])
    assert learned(encoder, made) == ["\none<|im_end|>"]
    assert made.ids.tolist() == expected_ids(
        tokenizer, FAMILIES["chatml"].pieces([ASKED, {"role": "assistant", "content": "\none"}])
    )


def blank_first_tokenizer(template: str, folder: Path) -> str:
    """One that puts a blank before each text and joins blanks with what follows, as Llama 2's does."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], show_progress=False
    )
    backend.train_from_iterator(
        ["What? The answer. is it Q: A: [INST] ] Bye Hello \n " * 3 + "x:-) " * 50], trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_that_cannot_be_given_a_text_in_parts(tmp_path: Path) -> None:
    encoder = ChatEncoder(
        blank_first_tokenizer(FAMILIES["mistral"].template, tmp_path / "a"), DataConfig(format="messages")
    )
    made = encode(encoder, [ASKED, SAID])
    assert made.ids.tolist() == encoder.text.tokenizer.apply_chat_template(
        [ASKED, SAID], tokenize=True, return_dict=False
    )
    assert [text.strip() for text in learned(encoder, made)] == ["The answer.</s>"]
    plain = "{% for m in messages %}{{ 'Q:' if m.role == 'user' else ' A:' }}{{ m.content }}{{ eos_token }}{% endfor %}"
    plain += "{% if add_generation_prompt %} A:{% endif %}"
    encoder = ChatEncoder(blank_first_tokenizer(plain, tmp_path / "b"), DataConfig(format="messages"))
    with pytest.raises(BadRecord, match="token across the begin of a turn"):
        encoder.encode({"messages": [ASKED, {"role": "assistant", "content": "-)"}]})


@pytest.mark.parametrize("post", [False, True], ids=["", "post_processor"])
@pytest.mark.parametrize("prints", [False, True], ids=["", "template"])
def test_exactly_one_bos(make: Make, prints: bool, post: bool) -> None:
    family = FAMILIES["chatml"]
    template = ("{{ bos_token }}" if prints else "") + family.template
    with_bos = Family([*family.specials, "<s>"], family.eos, template, template, family.pieces, bos="<s>")
    encoder = make(with_bos, tokenizer={"post_bos": post})
    made = encode(encoder, [ASKED, SAID])
    assert encoder.text.tokenizer("a")["input_ids"].count(encoder.text.tokenizer.bos_token_id) == post
    wanted = int(prints or post)
    assert (made.ids == encoder.text.tokenizer.bos_token_id).sum() == wanted
    assert not wanted or made.ids[0] == encoder.text.tokenizer.bos_token_id
    assert learned(encoder, made) == ["The answer.<|im_end|>"]
    assert any("put in front" in note for note in encoder.notes()) == (post and not prints)


@pytest.mark.parametrize("post", [False, True])
def test_a_template_that_prints_two_bos_is_refused(make: Make, post: bool) -> None:
    family = FAMILIES["chatml"]
    template = "{{ bos_token }}{{ bos_token }}" + family.template
    with pytest.raises(ConfigError, match="once, not twice"):
        make(
            Family([*family.specials, "<s>"], family.eos, template, template, family.pieces, "<s>"),
            tokenizer={"post_bos": post},
        )


@pytest.mark.parametrize("marked", [False, True])
def test_the_closing_token_is_learned_once_a_turn_where_pad_is_eos(make: Make, marked: bool) -> None:
    encoder = make(FAMILIES["chatml"], marked, tokenizer={"pad": "<|im_end|>"})
    assert encoder.text.tokenizer.pad_token_id == encoder.eos_id
    made = encode(encoder, [ASKED, SAID, ASKED, SAID])
    closing = made.ids == encoder.eos_id
    assert closing.sum() == 4 and (closing & made.targets).sum() == 2
    first = int(np.flatnonzero(made.targets)[0])
    assert decoded(encoder, made.ids[:first]).endswith("<|im_start|>assistant\n")


def test_marks_that_leave_out_the_closing_token_or_take_in_the_header(make: Make) -> None:
    family = FAMILIES["chatml"]
    short = family.marked.replace(
        "{{ '<|im_end|>' }}\n    {%- endgeneration -%}", "{%- endgeneration -%}{{ '<|im_end|>' }}"
    )
    head = "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    wide = family.template.replace(head, "{%- generation %}" + head).replace(
        "{{ '\\n' }}{%- endfor", "{{ '\\n' }}{%- endgeneration %}{%- endfor"
    )
    wide = wide.replace(
        "{%- for message in messages %}", "{%- for message in messages if message.role == 'assistant' %}", 1
    )
    assert short != family.marked
    for template in (short, wide):
        encoder = make(Family(family.specials, family.eos, template, template, family.pieces))
        assert learned(encoder, encode(encoder, [SAID, SAID])) == ["The answer.<|im_end|>"] * 2


def test_the_assistant_may_begin_and_say_nothing(make: Make) -> None:
    for marked in (False, True):
        encoder = make(FAMILIES["chatml"], marked)
        made = encode(encoder, [SAID, {"role": "assistant", "content": ""}, ASKED])
        assert learned(encoder, made) == ["The answer.<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize("marked", [False, True])
def test_time_is_linear_in_the_number_of_turns(
    make: Make, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in characters that the template renders, not in seconds: one call a turn would make it 100 times more."""
    encoder = make(FAMILIES["llama"], marked)
    tokenizer = encoder.text.tokenizer
    rendered: list[int] = []
    plain = tokenizer.apply_chat_template

    def counted(*args: Any, **kwargs: Any) -> Any:
        text = plain(*args, **kwargs)
        rendered.append(len(text))
        return text

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    totals, source = [], random.Random(3)
    turns = [
        {"role": role, "content": source.choice(ALPHABET[:3]) * 3}
        for _ in range(1600)
        for role in ("user", "assistant")
    ]
    for count in (800, 1600, 3200):
        rendered.clear()
        made = encode(encoder, turns[:count])
        assert len(learned(encoder, made)) == count // 2
        length = len(decoded(encoder, made.ids))
        assert sum(rendered) < 12 * length
        totals.append(sum(rendered) / length)
    assert totals[2] <= totals[0] * 1.05


@pytest.mark.parametrize(
    "ending",
    ["{{ eos_token }}", "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"],
    ids=["eos", "prompt"],
)
@pytest.mark.parametrize("marked", [False, True])
def test_what_a_template_prints_behind_the_last_turn_is_no_target(
    make: Make, ending: str, marked: bool
) -> None:
    """An end of text in place of the generation prompt (Phi 3), or the prompt unasked (the first Llama 3 template)."""
    family = FAMILIES["llama"]
    start = "{%- if add_generation_prompt %}"
    assert start in family.template
    if "eos" in ending:
        templates = [
            one.rpartition("{%- endif %}")[0] + "{%- else %}" + ending + "{%- endif %}"
            for one in (family.template, family.marked)
        ]
    else:
        templates = [one[: one.rindex(start)] + ending for one in (family.template, family.marked)]
    encoder = make(
        Family(family.specials, family.eos, templates[0], templates[1], family.pieces, family.bos), marked
    )
    for turns in ([ASKED, SAID], [ASKED, SAID, ASKED, SAID], [ASKED, SAID, ASKED]):
        made = encode(encoder, turns)
        assert learned(encoder, made) == ["The answer.<|eot_id|>"] * sum(turn is SAID for turn in turns)
        text = decoded(encoder, made.ids)
        assert text.endswith("<|end|>" if "eos" in ending else "assistant<|end_header_id|>\n\n"), (
            "as the template has it"
        )
