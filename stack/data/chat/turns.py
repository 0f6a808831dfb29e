"""Which stretches of a rendered conversation are targets: what its assistant turns say, each with its closing token."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from stack.config.schema_data import DataConfig
from stack.data.chat.forms import REASONING, BadRecord, Conversation, Message
from stack.data.chat.template import NONCHARACTERS, ChatTemplate, Marks, template_fault
from stack.errors import ConfigError

Span = tuple[int, int]
"""Characters [begin, end) of the rendered text."""

RENDERED_AGAIN = 4
"""Text that checks of turns render beside the text itself, as a multiple of it. Up to about 4 assistant turns, all are
checked; of more, each kind once, the last, and the first ones: the whole stays linear in the length."""

WAYS_OUT = (
    "Ways out: data.loss_on=last; a template that leaves earlier turns as they were said, such as "
    "data.chat_template=conf/chat/qwen3.jinja; one that marks what to learn by {% generation %}"
)


class TurnSpans:
    """Targets of conversations under one template.

    Generation marks decide where the template has them. Otherwise a turn's target is what the template adds to the
    turns before it and the generation prompt: exactly what a model is asked to say there. The turns' places come from
    one rendering with marks, and are checked by rendering the turns before them alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig):
        """Raises ConfigError if the template does not serve."""
        self.template = ChatTemplate(tokenizer, data)
        self.loss_on = data.loss_on
        self._specials = tuple(
            sorted(
                (token.content for token in tokenizer.added_tokens_decoder.values() if token.special), key=len
            )
        )
        self._header = self._closing = self._ending = ""
        if self.loss_on != "all":
            self._learn(data)

    def spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The rendered text and its targets, in order; none if there is nothing to learn. Raises BadRecord."""
        self.template.check_fields(conversation)
        text = self.template.render(conversation.messages, conversation.tools)
        marks = self.template.marks(text, conversation)
        if marks is not None:
            self._check_printed(text, conversation, marks)
        if self.loss_on == "all":
            return text, [(0, len(text))]
        wanted = self.wanted(conversation)
        if not wanted:
            return text, []
        if self.template.has_generation:
            return text, self._marked(text, conversation, marks, wanted)
        return text, self._incremental(text, conversation, marks, wanted)

    def wanted(self, conversation: Conversation) -> list[int]:
        """Numbers of the assistant turns that are to be learned."""
        wanted = [
            number
            for number, turn in enumerate(conversation.messages)
            if turn["role"] == "assistant" and number >= conversation.first and turn.get("weight", 1)
        ]
        return wanted[-1:] if self.loss_on == "last" else wanted

    def _learn(self, data: DataConfig) -> None:
        """Generation prompt, closing token and ending of the template, from conversations of one to three turns."""
        asked: list[Message] = [{"role": "user", "content": "Hello"}]
        sample = Conversation([*asked, {"role": "assistant", "content": "Bye"}])
        try:
            whole = self.template.render(sample.messages, [])
            self._ending = self._find_ending(whole, Conversation([*sample.messages, *asked]))
            before = self.template.render(asked, []).removesuffix(self._ending)
            self._header = self.template.render(asked, [], prompt=True).removeprefix(before)
            marks = self.template.marks(whole, sample)
            if self.template.has_generation and marks and marks.generation:
                behind = marks.generation[-1][1]
                found = (one for one in self._specials if whole.startswith(one, behind))
                self._closing = max(found, key=len, default="")
            text, spans = self.spans(sample)
        except BadRecord as error:
            raise ConfigError(
                [template_fault(data, f"one that serves data.format={data.format} ({error})")]
            ) from error
        said = "".join(text[begin:end] for begin, end in spans)
        if "Bye" not in said or said.rpartition("Bye")[2].strip() not in self._specials:
            want = (
                "one whose assistant turns end in a special token of the tokenizer, which the model learns to stop with "
                f"(a turn of 'Bye' gives {said!r} to learn)"
            )
            raise ConfigError([template_fault(data, want)])

    def _find_ending(self, whole: str, longer: Conversation) -> str:
        """What the template prints behind the last turn of `whole`, a conversation that `longer` has one more turn than:
        an end-of-text token, or a generation prompt that nobody asked for."""
        try:
            text = self.template.render(longer.messages, [])
        except BadRecord:
            return ""
        marks = self.template.marks(text, longer)
        same = text[: marks.turns.get(len(longer.messages) - 1, 0)] if marks else ""
        return whole.removeprefix(same) if same and whole.startswith(same) else ""

    def _check_printed(self, text: str, conversation: Conversation, marks: Marks) -> None:
        """Refuse a conversation with a turn that the template leaves out. Raises BadRecord.

        A turn that the loop prints nothing for may stand elsewhere, as a system prompt in front of the loop. Its words may
        be those of another turn or of the template itself, so the template is asked with words that are nobody's.
        """
        ends = dict(pairwise(sorted(marks.turns)))
        silent = {}
        sign = next(sign for sign in NONCHARACTERS if sign not in text)  # there is one, as for the marks
        for number, place in marks.turns.items():
            end = marks.turns[ends[number]] if number in ends else len(text)
            if place == end and conversation.messages[number]["content"].strip():
                silent[number] = f"{sign}{number}{sign}"
        if not silent:
            return
        messages = [
            {**turn, "content": silent.get(number, turn["content"])}
            for number, turn in enumerate(conversation.messages)
        ]
        printed = self.template.render(messages, conversation.tools)
        for number, words in silent.items():
            if words not in printed:
                role = conversation.messages[number]["role"]
                detail = f"the chat template prints nothing for turn {number}, of role {role}"
                raise BadRecord("turn unknown to the chat template", detail)

    def _marked(
        self, text: str, conversation: Conversation, marks: Marks | None, wanted: list[int]
    ) -> list[Span]:
        """Targets by the template's own marks, without headers, each turn's last one with the closing token."""
        if marks is None:
            raise BadRecord(
                "generation blocks not found",
                "the chat template changes the text inside or around its generation blocks",
            )
        turns, chosen = self._turns_of_blocks(conversation, marks), set(wanted)
        spans = []
        for number, (begin, end) in enumerate(marks.generation):
            if turns[number] not in chosen:
                continue
            if self._header and text.startswith(self._header, begin):
                begin += len(self._header)
            last = number + 1 == len(turns) or turns[number + 1] != turns[number]
            spans.append((begin, self._close(text, begin, end) if last else end))
        return [(begin, end) for begin, end in spans if begin < end]

    def _turns_of_blocks(self, conversation: Conversation, marks: Marks) -> list[int]:
        """The number of the message that each generation block belongs to."""
        said = [number for number, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
        if set(said) <= marks.turns.keys():
            places = [marks.turns[number] for number in said]
            found = [bisect.bisect_right(places, begin) - 1 for begin, _ in marks.generation]
            if places == sorted(places) and all(index >= 0 for index in found):
                return [said[index] for index in found]
        if len(said) != len(marks.generation):
            counts = f"{len(marks.generation)} generation blocks for {len(said)} assistant turns"
            raise BadRecord("generation blocks not found", f"{counts}, and which is whose cannot be told")
        return said

    def _close(self, text: str, begin: int, end: int) -> int:
        """Where a turn's target ends: behind its closing token, before what whitespace follows."""
        said = text[begin:end].rstrip()
        if said.endswith(self._specials):
            return begin + len(said)
        return end + len(self._closing) if text.startswith(self._closing, end) else end

    def _incremental(
        self, text: str, conversation: Conversation, marks: Marks | None, wanted: list[int]
    ) -> list[Span]:
        """Targets by what each turn adds to the text before it."""
        located = self._locate(text, conversation, marks, wanted)
        exact = {
            number: self._added(text, conversation, number, located)
            for number in _chosen(conversation, wanted)
        }
        agree = all(located.get(number) == span for number, span in exact.items())
        missing = [number for number in wanted if number not in exact and not (agree and number in located)]
        if missing:
            detail = f"turns cannot be found at once, and {len(wanted)} turns are too many to render each. {WAYS_OUT}"
            raise BadRecord("turns not found in the rendered text", detail)
        spans = []
        for number in wanted:
            begin, end = exact.get(number) or located[number]
            said = text[begin:end].rstrip()
            if not said.endswith(self._specials):
                detail = f"turn {number} ends in {text[max(end - 20, begin) : end]!r}, which holds no special token at its end"
                raise BadRecord("turn without a closing token", detail)
            spans.append((begin, begin + len(said)))
        return spans

    def _locate(
        self, text: str, conversation: Conversation, marks: Marks | None, wanted: list[int]
    ) -> dict[int, Span]:
        """Turns as the marks show them, headers left out; those are missing that do not begin with the header."""
        if marks is None:
            return {}
        places = [marks.turns[number] for number in sorted(marks.turns)]
        if places != sorted(places):
            return {}
        ends = dict(pairwise(sorted(marks.turns)))
        located = {}
        for number in wanted:
            begin = marks.turns.get(number)
            if begin is not None and text.startswith(self._header, begin):
                end = marks.turns[ends[number]] if number in ends else len(text.removesuffix(self._ending))
                located[number] = (begin + len(self._header), end)
        return located

    def _added(self, text: str, conversation: Conversation, number: int, located: dict[int, Span]) -> Span:
        """What turn `number` adds to the turns before it and the generation prompt. Raises BadRecord if the text does
        not begin with these, so that the turn stands in it otherwise than it was said."""
        messages, tools = conversation.messages, conversation.tools
        if number == 0:  # nothing can be rendered before it
            if 0 not in located:
                raise BadRecord(
                    "turns not found in the rendered text",
                    f"nothing comes before the first turn, the assistant's. {WAYS_OUT}",
                )
            before, begin = text[: located[0][0]], located[0][0]
        else:
            before = self.template.render(messages[:number], tools, prompt=True)
            begin = len(before)
        last = number + 1 == len(messages)
        after = text if last else self.template.render(messages[: number + 1], tools)
        after = after.removesuffix(self._ending)
        if not after.startswith(before):
            detail = (
                f"the chat template begins turn {number} otherwise than by its generation prompt. {WAYS_OUT}"
            )
            raise BadRecord("earlier turns reworded by the chat template", detail)
        if not text.startswith(after):
            detail = f"the chat template words turn {number} otherwise once turns follow it. {WAYS_OUT}"
            raise BadRecord("earlier turns reworded by the chat template", detail)
        return begin, len(after)


def _chosen(conversation: Conversation, wanted: list[int]) -> Iterable[int]:
    """Turns to check: the last one, the first of each kind, and from the first on what the bound allows."""
    messages = conversation.messages
    first_of_kind: dict[object, int] = {}
    for number in wanted:
        turn = messages[number]
        around = [
            messages[place]["role"] if 0 <= place < len(messages) else None
            for place in (number - 1, number + 1)
        ]
        thought = "</think>" in turn["content"] or any(turn.get(key) for key in REASONING)
        first_of_kind.setdefault((*around, "tool_calls" in turn, thought, bool(turn["content"])), number)
    chosen = {wanted[-1], *first_of_kind.values()}
    cost = 0.0
    for number in wanted:
        cost += 2 * (number + 1) / len(messages)
        if cost > RENDERED_AGAIN:
            break
        chosen.add(number)
    return sorted(chosen)
