"""The settings that a checkpoint was saved under beside today's: what differs, and what of it would spoil the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stack.config.convert import leaves

SPOILING = {
    "seed": "the order of the data",
    "model.path": "the model",
    "model.architecture": "the model",
    "model.rope": "the positions",
    "model.freeze": "what is trained",
    "model.tokenizer": "the tokens",
    "data.source": "the text",
    "data.path": "the text",
    "data.mixture": "the text",
    "data.text_field": "the text",
    "data.format": "the text",
    "data.messages_field": "the text",
    "data.tools_field": "the text",
    "data.chat_template": "the tokens",
    "data.template_variables": "the tokens",
    "data.loss_on": "what is learned",
    "data.bad_text": "the text",
    "data.random_tokens": "the text",
    "data.random_document_tokens": "the text",
    "data.train_tokenizer": "the tokens",
    "data.vocab_size": "the tokens",
    "data.append_eos": "the tokens",
    "data.seq_len": "the rows",
    "data.packing": "the rows",
    "data.too_long": "the rows",
    "data.eval_fraction": "the rows",
    "data.shuffle": "the order of the data",
    "method": "what is learned",
    "engine.precision": "the type of the weights",
    "optim.name": "the optimizer, whose states then start anew",
}
"""Settings and sections that a run is not continued under when they change, and what changes with them."""
OPEN = ("model.architecture", "engine.overrides", "data.template_variables")
"""Sections of free names, in which a missing name means something. Elsewhere it is a setting of another version."""
PATHS = ("data.path", "data.chat_template", "model.path", "model.tokenizer")
"""Settings that name a folder; however it is spelt, the same folder is the same value."""
ROWS = "engine.accumulation"
"""The name that takes another number of rows a step, whatever setting it comes from."""


@dataclass(frozen=True)
class Difference:
    """One setting and both its values; None where the name is absent."""

    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: saved {self.saved!r}, now {self.now!r}"


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """All settings that differ, in today's order. saved, now: nested dicts of plain values."""
    before, after = dict(leaves(saved)), dict(leaves(now))
    found = []
    for key in [*after, *(key for key in before if key not in after)]:
        known = (key in before and key in after) or key.startswith(tuple(f"{name}." for name in OPEN))
        if known and _value(key, before) != _value(key, after):
            found.append(Difference(key, before.get(key), after.get(key)))
    return found


def spoils(difference: Difference) -> str | None:
    """What the run would lose by it, or None if it may change."""
    return next((what for name, what in SPOILING.items() if _covers(name, difference.key)), None)


def is_forced(key: str, force: Sequence[str]) -> bool:
    """Whether `checkpoint.force` names the setting or a section that it lies in."""
    return any(_covers(name, key) for name in force)


def _value(key: str, values: dict[str, Any]) -> Any:
    value = values.get(key)
    return os.path.realpath(os.path.expanduser(value)) if key in PATHS and value else value


def _covers(name: str, key: str) -> bool:
    return key == name or key.startswith(f"{name}.")
