"""The chat templates that come with the project: every turn as it was said, and marks around what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stack.config.derive import REPO_ROOT
from tests.unit.chat_rig import ASKED, FAMILIES, SAID, Make, decoded, encode, learned, maker

SHIPPED = sorted((REPO_ROOT / "conf" / "chat").glob("*.jinja"))
CALLS = [
    {"type": "function", "function": {"name": name, "arguments": {"at": "한국"}}} for name in ("look", "read")
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
SESSION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    ASKED,
    {"role": "assistant", "content": "", "reasoning_content": "first", "tool_calls": CALLS},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    {**SAID, "reasoning_content": "then"},
    ASKED,
    SAID,
]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return maker(tmp_path)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_plain_turns_and_the_generation_prompt(make: Make, file: Path) -> None:
    encoder = make(FAMILIES["chatml"], chat_template=f"conf/chat/{file.name}")
    turns = [ASKED, SAID, {"role": "system", "content": "More."}, ASKED, SAID, SAID]
    made = encode(encoder, turns)
    assert learned(encoder, made) == ["The answer.<|im_end|>"] * 3
    assert decoded(encoder, made.ids) == "".join(text for text, _ in FAMILIES["chatml"].pieces(turns))
    tokenizer = encoder.text.tokenizer
    template = file.read_text()
    asked = tokenizer.apply_chat_template(
        turns[:4], chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert decoded(encoder, made.ids).startswith(str(asked)), "a model is asked as it was taught"


def test_qwen3_with_tools_and_thinking(make: Make) -> None:
    encoder = make(FAMILIES["chatml"], chat_template="conf/chat/qwen3.jinja")
    made = encode(encoder, SESSION, tools=TOOLS)
    calls = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"at": "한국"}}}}\n</tool_call>'
        for name in ("look", "read")
    )
    assert learned(encoder, made) == [
        f"<think>\nfirst\n</think>\n\n{calls}<|im_end|>",
        "<think>\nthen\n</think>\n\nThe answer.<|im_end|>",
        "The answer.<|im_end|>",
    ]
    text = decoded(encoder, made.ids)
    results = "\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert f"<|im_start|>user{results}<|im_end|>\n" in text
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and '{"type": "function"' in text


def test_chatml_with_tools(make: Make) -> None:
    encoder = make(FAMILIES["chatml"], chat_template="conf/chat/chatml.jinja")
    turns = [{key: value for key, value in turn.items() if key != "reasoning_content"} for turn in SESSION]
    said = learned(encoder, encode(encoder, turns, tools=TOOLS))
    assert (
        len(said) == 3
        and said[0].startswith("<tool_calls>[{")
        and said[0].endswith("]</tool_calls><|im_end|>")
    )
