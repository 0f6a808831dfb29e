"""The chat template: where it comes from, and how it renders, plain or with marks at turns and generation blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jinja2
from transformers import PreTrainedTokenizerBase

from stack.config.chat_checks import template_file
from stack.config.schema_data import DataConfig
from stack.data.chat.forms import REASONING, BadRecord, Conversation, Message
from stack.errors import ConfigError, Fault

RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises on a conversation that it was not written for."""

GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
LOOP = re.compile(r"\{%[-+]?\s*for\s+([A-Za-z_]\w*)\s+in\b(?:(?!%\}).)*?([-+]?)%\}", re.DOTALL)
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that Unicode gives no meaning; one that a text lacks can mark places in it."""


@dataclass(frozen=True)
class Marks:
    """Places in a rendered text, in characters."""

    turns: dict[int, int]
    """Number of a message -> where the template's loop came to it. Some messages have none."""

    generation: list[tuple[int, int]]
    """Begin and end of each `{% generation %}` block, in order."""


class ChatTemplate:
    """A template with the variables that it is always given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig):
        """Raises ConfigError if there is no template or it cannot be read."""
        self.tokenizer, self.variables = tokenizer, data.template_variables
        self.source = effective_template(tokenizer, data)
        self.bos_added = self.source != given_template(tokenizer, data)
        self.has_generation = GENERATION.search(self.source) is not None
        self._marked = _with_marks(self.source)
        self._prints_tools = re.search(r"\btools\b", self.source) is not None
        self._prints_reasoning = re.search(r"reasoning_content|\bthinking\b", self.source) is not None

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]], prompt: bool = False) -> str:
        """prompt: end with what asks for the next assistant turn. Raises BadRecord."""
        try:
            return self._apply(self.source, messages, tools, prompt, {})
        except RENDER_ERRORS as error:
            raise BadRecord(
                "refused by the chat template", f"the chat template gives {type(error).__name__}: {error}"
            ) from error

    def marks(self, text: str, conversation: Conversation) -> Marks | None:
        """Places of turns and generation blocks in `text`, which is the conversation's rendering.

        They come from a second rendering whose template prints a mark at each place. None where that one gives
        another text once its marks are taken out, as for a template that measures or trims what it has printed.
        """
        sign = next((sign for sign in NONCHARACTERS if sign not in text), None)
        if sign is None:
            return None
        messages = [
            {**message, "turn_mark": f"{sign}{number}{sign}"}
            for number, message in enumerate(conversation.messages)
        ]
        signs = {"generation_begin": f"{sign}b{sign}", "generation_end": f"{sign}e{sign}"}
        try:
            pieces = self._apply(self._marked, messages, conversation.tools, False, signs).split(sign)
        except RENDER_ERRORS:
            return None
        if "".join(pieces[::2]) != text:
            return None
        turns: dict[int, int] = {}
        blocks: list[tuple[int, int]] = []
        place = begin = 0
        for piece, kind in zip(pieces[::2], pieces[1::2], strict=False):
            place += len(piece)
            if kind == "b":
                begin = place
            elif kind == "e":
                blocks.append((begin, place))
            else:
                turns[int(kind)] = place  # the last loop over the messages is the one that prints them
        return Marks(turns, blocks)

    def check_fields(self, conversation: Conversation) -> None:
        """Refuse a record with a part that the template would leave out without a word. Raises BadRecord."""
        lost = []
        if conversation.tools and not self._prints_tools:
            lost.append("tools")
        if "tool_calls" not in self.source and any("tool_calls" in turn for turn in conversation.messages):
            lost.append("tool_calls")
        thoughts = any(turn.get(key) for turn in conversation.messages for key in REASONING)
        if thoughts and not self._prints_reasoning:
            lost.append("reasoning_content")
        if lost:
            detail = f"the chat template never prints {' and '.join(lost)}; data.chat_template=FILE gives another one"
            raise BadRecord("field unknown to the chat template", detail)

    def _apply(
        self,
        source: str,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
        prompt: bool,
        signs: dict[str, str],
    ) -> str:
        variables: dict[str, Any] = {**self.variables, **signs}
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=cast(Any, tools or None),
            chat_template=source,
            add_generation_prompt=prompt,
            tokenize=False,
            **variables,
        )
        assert isinstance(text, str), "one conversation without tokenizing gives one text"
        return text


def adopt_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Give a tokenizer the template that supervised data is rendered by, so that whatever serves the trained model asks
    it in the same form. Raises ConfigError."""
    try:
        tokenizer.chat_template = effective_template(tokenizer, data)
    except ConfigError:
        if data.chat_template is not None:
            raise
        # The tokenizer's own renders nothing, so that the records were texts, which no template rendered.


def effective_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> str:
    """The template by which supervised data is rendered, and which belongs to the trained model.

    It is that of `data.chat_template` or the tokenizer's own, with the BOS token in front where the tokenizer puts one
    before a text and the template does not print it. Raises ConfigError.
    """
    source = given_template(tokenizer, data)
    if not isinstance(source, str):
        names = f" (it has several: {', '.join(source)})" if source else ""
        want = f"a file with a chat template, since the tokenizer has none of its own{names}"
        tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        file = f"FILE, whose assistant turns end in {tokenizer.eos_token}, in the form that the model's card gives"
        if {"<|im_start|>", "<|im_end|>"} <= tokens:
            file = "conf/chat/chatml.jinja"
        fix = f"data.chat_template={file}, or a tokenizer with a template"
        raise ConfigError([Fault("data.chat_template", data.chat_template, want, fix)])
    bos = str(tokenizer.bos_token or "")
    if not bos:
        return source
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}],
            chat_template=source,
            tokenize=False,
            **data.template_variables,
        )
    except RENDER_ERRORS as error:
        raise ConfigError([template_fault(data, f"one that renders a user's turn ({error})")]) from error
    assert isinstance(text, str)
    if text.startswith(bos + bos):
        raise ConfigError([template_fault(data, f"one that prints {bos} once, not twice")])
    return source if text.startswith(bos) or not leading_bos(tokenizer) else "{{ bos_token }}" + source


def given_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Any:
    """The text of `data.chat_template`, else what the tokenizer has: a template, several by name, or None. Raises
    ConfigError."""
    file = template_file(data)
    if file is None:
        return tokenizer.chat_template
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        want = f"a file with a Jinja template ({error})"
        raise ConfigError(
            [Fault("data.chat_template", data.chat_template, want, "check the path")]
        ) from error


def template_fault(data: DataConfig, want: str) -> Fault:
    """A fault of the template, wherever it comes from."""
    key, given = "data.chat_template", data.chat_template
    if given is None:
        return Fault(key, None, f"{want}; the tokenizer's own is not", "give one by data.chat_template=FILE")
    return Fault(key, given, want, "mend the template")


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> str:
    """The BOS token, if this tokenizer puts it before a text by itself; else nothing."""
    ids = tokenizer("a")["input_ids"]
    assert isinstance(ids, list)
    return str(tokenizer.bos_token) if tokenizer.bos_token and ids[:1] == [tokenizer.bos_token_id] else ""


def _with_marks(source: str) -> str:
    """The template, printing `turn_mark` of each mapping that a loop comes to, and `generation_begin` and
    `generation_end` at the edges of its generation blocks.

    Each mark ends in a block tag with the sign of the tag it follows, so that what whitespace the tag takes away is
    taken away still.
    """
    source = LOOP.sub(
        lambda tag: (
            f"{tag[0]}{{% if {tag[1]} is mapping and {tag[1]}.turn_mark is defined %}}{{{{ {tag[1]}.turn_mark }}}}"
            f"{{% endif {tag[2]}%}}"
        ),
        source,
    )
    source = GENERATION.sub(r"{%\1 generation %}{{ generation_begin }}{% if true %}{% endif \2%}", source)
    return END_GENERATION.sub(r"{%\1 if true %}{% endif %}{{ generation_end }}{% endgeneration \2%}", source)
