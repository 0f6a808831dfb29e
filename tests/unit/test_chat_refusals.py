"""Tools and thinking, and what is refused rather than learned wrongly: each with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stack.config.schema_data import DataConfig
from stack.data.chat.encode import BadRecord, ChatEncoder
from stack.errors import ConfigError
from tests.unit.chat_rig import (
    ASKED,
    FAMILIES,
    SAID,
    THINKER,
    Family,
    Make,
    Turns,
    encode,
    learned,
    make_tokenizer,
    maker,
)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return maker(tmp_path)


def call(**arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": arguments}}]}


@pytest.mark.parametrize("marked", [False, True])
def test_tool_calls_are_learned_and_tools_and_results_are_not(make: Make, marked: bool) -> None:
    encoder = make(THINKER, marked)
    turns = [
        ASKED,
        {"role": "assistant", "content": None, "reasoning_content": "think", **call(at="한국")},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "done", "reasoning_content": "more"},
    ]
    made = encode(
        encoder, turns, tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}]
    )
    first = '<think>\nthink\n</think>\n\n<call>look {"at": "한국"}</call><|im_end|>'
    assert learned(encoder, made) == [first, "<think>\nmore\n</think>\n\ndone<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_way_out(make: Make) -> None:
    thoughts = [ASKED, {**SAID, "reasoning_content": "think"}]
    with pytest.raises(
        BadRecord, match=r"words turn 1 otherwise once turns follow it.*data\.loss_on=last.*generation"
    ):
        make(THINKER).encode({"messages": thoughts + thoughts})
    encoder = make(THINKER, loss_on="last")
    assert learned(encoder, encode(encoder, thoughts + thoughts)) == [
        "<think>\nthink\n</think>\n\nThe answer.<|im_end|>"
    ]
    encoder = make(THINKER, True)
    said = ["The answer.<|im_end|>", "<think>\nthink\n</think>\n\nThe answer.<|im_end|>"]
    assert learned(encoder, encode(encoder, thoughts + thoughts)) == said
    plain = [ASKED, SAID]
    encoder = make(THINKER)
    assert learned(encoder, encode(encoder, plain + plain)) == ["The answer.<|im_end|>"] * 2, (
        "nothing to rewrite in these"
    )


def test_a_rewrite_late_in_a_long_conversation_is_found(make: Make) -> None:
    """Most turns of a long one are not rendered again; the first of a kind always is."""
    turns = [ASKED, SAID] * 200
    turns[301] = {**SAID, "reasoning_content": "think"}
    with pytest.raises(BadRecord, match="words turn 301 otherwise"):
        make(THINKER).encode({"messages": turns})


def test_a_template_whose_loop_cannot_be_marked(make: Make) -> None:
    """Few turns are rendered one by one; many are refused rather than guessed."""
    family = FAMILIES["chatml"]
    by_index = family.template.replace(
        "{%- for message in messages %}",
        "{%- for at in range(messages | length) %}{%- set message = messages[at] %}",
    )
    encoder = make(Family(family.specials, family.eos, by_index, by_index, family.pieces))
    assert learned(encoder, encode(encoder, [ASKED, SAID, ASKED, SAID])) == ["The answer.<|im_end|>"] * 2
    with pytest.raises(BadRecord, match="50 turns are too many"):
        encoder.encode({"messages": [ASKED, SAID] * 50})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{{ '<|im_end|>' }}", ""), "no special token at its end"),
        (("{{ '<|im_end|>' }}", "{{ raise_exception('never') }}"), "refused by the chat template.*never"),
        (("{%- endfor %}", ""), "refused by the chat template.*endfor"),
        (
            ("{{ message['content'] }}", "{{ message['content'] if message.role == 'user' }}"),
            "end in a special token",
        ),
    ],
)
def test_a_template_that_cannot_serve_is_refused_at_the_start(
    make: Make, change: tuple[str, str], message: str
) -> None:
    family = FAMILIES["chatml"]
    template = family.template.replace(*change)
    assert template != family.template
    with pytest.raises(ConfigError, match=rf"data\.chat_template.*{message}"):
        make(Family(family.specials, family.eos, template, template, family.pieces))


@pytest.mark.parametrize(
    ("turns", "fields", "reason"),
    [
        ([ASKED, {**SAID, **call(a=1)}], {}, "field unknown to the chat template"),
        ([ASKED, {**SAID, "reasoning_content": "x"}], {}, "field unknown to the chat template"),
        ([ASKED, SAID], {"tools": [{"name": "look"}]}, "field unknown to the chat template"),
        ([ASKED, ASKED, SAID], {}, "refused by the chat template"),
    ],
)
def test_nothing_of_a_record_is_left_out_without_a_word(
    make: Make, turns: Turns, fields: dict, reason: str
) -> None:
    with pytest.raises(BadRecord) as caught:
        make(FAMILIES["mistral"]).encode({"messages": turns, **fields})
    assert caught.value.reason == reason


def test_a_turn_that_the_template_does_not_print_is_refused(make: Make) -> None:
    family = FAMILIES["chatml"]
    template = family.template.replace("messages %}", "messages %}{%- if message.role != 'developer' %}", 1)
    template = template.replace("{%- endfor", "{%- endif %}{%- endfor", 1)
    encoder = make(Family(family.specials, family.eos, template, template, family.pieces))
    with pytest.raises(BadRecord, match="prints nothing for turn 1, of role developer"):
        encoder.encode({"messages": [ASKED, {"role": "developer", "content": "be brief"}, SAID]})
    with pytest.raises(BadRecord, match="prints nothing for turn 1"):  # its words stand in <|im_end|>
        encoder.encode({"messages": [ASKED, {"role": "developer", "content": "end"}, SAID]})


def test_a_turn_that_the_template_prints_before_its_loop_is_none_left_out(make: Make) -> None:
    family = FAMILIES["chatml"]
    loop = "{%- for message in messages %}"
    before = (
        "{{ '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}"
        + loop
        + "{%- if not loop.first %}"
    )
    template = family.template.replace(loop, before).replace("{%- endfor", "{%- endif %}{%- endfor", 1)
    encoder = make(Family(family.specials, family.eos, template, template, family.pieces))
    turns = [{"role": "system", "content": " end "}, ASKED, SAID]
    assert learned(encoder, encode(encoder, turns)) == ["The answer.<|im_end|>"]


def test_the_advice_without_a_template_is_one_that_serves(tmp_path: Path) -> None:
    for specials, eos, advice in (
        (["<s>", "</s>"], "</s>", r"=FILE, whose assistant turns end in </s>"),
        (["<|im_start|>", "<|im_end|>"], "<|im_end|>", r"=conf/chat/chatml\.jinja"),
    ):
        folder = str(tmp_path / eos.strip("</|>"))
        make_tokenizer(specials, eos).save_pretrained(folder)
        with pytest.raises(ConfigError, match=f"none of its own.*{advice}"):
            ChatEncoder(folder, DataConfig(format="messages"))
    assert ChatEncoder(folder, DataConfig(format="messages", chat_template="conf/chat/chatml.jinja"))


def test_fingerprint_covers_all_that_decides(tmp_path: Path) -> None:
    folder = FAMILIES["llama"].save(tmp_path / "t")
    (tmp_path / "other.jinja").write_text(FAMILIES["llama"].marked)
    settings: list[dict[str, Any]] = [
        {}, {"loss_on": "last"}, {"format": "sharegpt"}, {"chat_template": str(tmp_path / "other.jinja")},
        {"template_variables": {"a": 1}}, {"tools_field": "functions"}, {"messages_field": "turns"},
    ]  # fmt: skip
    made = [
        ChatEncoder(folder, DataConfig(**{"format": "messages", **each})).fingerprint() for each in settings
    ]
    assert len(set(made)) == len(settings)
    assert made[0] == ChatEncoder(folder, DataConfig(format="messages", micro_batch=7)).fingerprint()
    tokenizer = make_tokenizer([*FAMILIES["llama"].specials, "<extra>"], "<|end|>", "<|begin|>")
    tokenizer.chat_template = FAMILIES["llama"].template
    tokenizer.save_pretrained(tmp_path / "more")
    assert ChatEncoder(str(tmp_path / "more"), DataConfig(format="messages")).fingerprint() not in made
