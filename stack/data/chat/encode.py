"""Supervised records -> ids with their targets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from stack.config.schema_data import DataConfig
from stack.data.chat.forms import REASONING, BadRecord, Completion, Conversation, read_record
from stack.data.chat.spans import SpanEncoder
from stack.data.chat.template import given_template, leading_bos
from stack.data.chat.turns import Span, TurnSpans
from stack.data.tokenizer import TextEncoder, load_tokenizer
from stack.errors import ConfigError, Fault

RULES = 2
"""Raised when the same record and settings come to give other ids or targets, so that stores are made anew."""

FORGED = "whose content spells out control tokens, which were read as such"
EMPTY = "with an empty answer, of which the closing token alone is learned"


@dataclass(frozen=True)
class Encoded:
    """One sample."""

    ids: np.ndarray
    """int64 [tokens], with exactly the BOS and end tokens that the model sees when it is served."""

    targets: np.ndarray
    """bool [tokens]: which of them are learned, by place."""

    remarks: tuple[str, ...] = ()
    """What its user may not have meant: no fault, but to be counted. Each continues `records ...`."""


@dataclass(frozen=True)
class Skipped:
    """A record without anything to learn: no fault, but to be counted."""

    reason: str


class ChatEncoder:
    """Records of `data.format` -> samples, for one process. Cheap beside the records of a worker: about a second for a
    vocabulary of 150,000."""

    def __init__(self, tokenizer_path: str, data: DataConfig):
        """Raises DataError, ConfigError."""
        self.data = data
        self.text = TextEncoder(load_tokenizer(tokenizer_path))
        tokenizer = self.text.tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            fix = "a model whose folder has a tokenizer.json"
            raise ConfigError(
                [Fault("model.tokenizer", tokenizer_path, "a fast tokenizer, which knows characters", fix)]
            )
        self._spans = SpanEncoder(cast(Tokenizer, tokenizer.backend_tokenizer))
        self._bos = leading_bos(tokenizer)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._control = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        plain = data.format == "prompt_completion"  # its records may be texts, which need no template
        self._turns = None if plain else TurnSpans(tokenizer, data)
        if plain and data.append_eos and self.text.eos_id is None:
            want, fix = "false: this tokenizer has no end-of-text token", "data.append_eos=false"
            raise ConfigError([Fault("data.append_eos", True, want, fix)])

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's end-of-text token; behind a sample it is there only if the template prints it."""
        return self.text.eos_id

    @property
    def num_ids(self) -> int:
        """Ids it can give, counting added tokens."""
        return self.text.num_ids

    def fingerprint(self) -> str:
        """Hash of all that decides its output: tokenizer, template, settings."""
        data = self.data
        settings = [data.format, data.loss_on, data.template_variables, data.messages_field, data.tools_field]
        template = given_template(self.text.tokenizer, data)
        special = {str(name): str(token) for name, token in self.text.tokenizer.special_tokens_map.items()}
        rules = [RULES, self.text.fingerprint(), self._bos, special, template, settings, data.append_eos]
        return hashlib.sha256(json.dumps(rules, sort_keys=True).encode(errors="surrogatepass")).hexdigest()

    def notes(self) -> list[str]:
        """What this template and tokenizer do that a user may not expect."""
        notes = []
        if self._turns is not None and self.data.loss_on != "all":
            turns = "the last assistant turn" if self.data.loss_on == "last" else "assistant turns"
            method = (
                "its generation marks"
                if self._turns.template.has_generation
                else "what each turn adds to those before it"
            )
            whose = self.data.chat_template or "the tokenizer's own"
            notes.append(f"learned: {turns}; chat template: {whose}, read by {method}")
        if self._turns is not None and "strftime_now" in self._turns.template.source:
            notes.append(
                "the chat template can print today's date: fix it by a variable that it reads, in data.template_variables"
            )
        if self._turns is not None and self._turns.template.bos_added:
            notes.append(
                f"{self._bos} was put in front of the chat template, which does not print it; it is exported so"
            )
        return notes

    def encode(self, record: dict[str, Any]) -> Encoded | Skipped:
        """Raises BadRecord for a record that cannot be learned from as it stands."""
        found = read_record(record, self.data)
        if isinstance(found, Completion):
            text, spans = self._join(found)
        else:
            self._turns = self._turns or TurnSpans(self.text.tokenizer, self.data)
            text, spans = self._turns.spans(found)
        if not spans:
            return Skipped("no assistant turn")
        ids, targets = self._spans.encode(text, spans)
        if not targets[1:].any():  # nothing comes before the first token that could predict it
            return Skipped("nothing to learn")
        return Encoded(ids, targets, self._remarks(found))

    def _remarks(self, found: Conversation | Completion) -> tuple[str, ...]:
        """What is to be told of a record that is learned."""
        if isinstance(found, Completion):
            said = [found.prompt.removeprefix(self._bos), found.completion]
            empty = not found.completion.strip()
        else:
            assert self._turns is not None, "it made the spans"
            keys = ("content", "tool_calls", *REASONING)
            said = [turn.get(key) for turn in found.messages for key in keys] + found.tools
            wanted = [found.messages[number] for number in self._turns.wanted(found)]
            empty = any(not turn["content"].strip() and not any(map(turn.get, keys[1:])) for turn in wanted)
        forged = self._control.search(json.dumps(said, ensure_ascii=False, default=str))
        return (FORGED,) * bool(forged) + (EMPTY,) * empty

    def _join(self, found: Completion) -> tuple[str, list[Span]]:
        """Prompt and completion as one text, BOS before and end-of-text behind as the tokenizer and settings have it."""
        bos = "" if found.prompt.startswith(self._bos) else self._bos
        begin = len(bos) + len(found.prompt)
        end = str(self.text.tokenizer.eos_token) if self.data.append_eos else ""
        text = f"{bos}{found.prompt}{found.completion}{end}"
        return text, [(0 if self.data.loss_on == "all" else begin, len(text))]


def explain_nothing_to_learn(data: DataConfig, left_out: Mapping[str, int]) -> str:
    """The likely cause when no record of a corpus has a target. left_out: reason -> number of records."""
    counts = "; ".join(f"{reason}: {count:,}" for reason, count in left_out.items()) or "none found"
    fixes = {
        "no assistant turn": "the records hold no turn of role assistant: check data.format and data.messages_field",
        "nothing to learn": f"no token of theirs is a target under data.loss_on={data.loss_on}: check the template's "
        "{% generation %} marks, or set data.loss_on=all",
        "missing field": f"the records have other fields than data.format={data.format} reads: check data.format and "
        "data.messages_field",
    }
    most = max(left_out, key=lambda reason: left_out[reason], default="")
    fix = fixes.get(
        most, "see what the first one says with data.bad_text=stop, and look at some with preview=3"
    )
    return f"data.path={data.path}: no record has anything to learn ({counts}). Fix: {fix}"


__all__ = ["BadRecord", "ChatEncoder", "Encoded", "Skipped", "explain_nothing_to_learn"]
