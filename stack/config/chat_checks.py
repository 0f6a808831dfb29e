"""What the settings of supervised data mean together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stack.config.derive import REPO_ROOT
from stack.config.schema_data import DataConfig
from stack.errors import Fault

NO_RECORDS = {"stdlib", "text", "tokens", "random"}
"""Sources whose documents have no fields."""


def chat_faults(data: DataConfig) -> Iterator[Fault]:
    """Contradictions between `data.format`, or that of a part of the mixture, and the other settings of the data."""
    template, form = data.chat_template, data.format
    if not is_supervised(data):
        if template is not None:
            want = "null for data.format=text, which no template renders"
            yield Fault(
                "data.chat_template", template, want, "data.format=messages, or data.chat_template=null"
            )
        return
    for part in data.mixture or [data]:
        source = part.source or data.source
        if (part.format or form) != "text" and source in NO_RECORDS:
            key = f"data.mixture.{part.name}.format" if data.mixture else "data.format"
            fix = "data=chat data.path=FILE.jsonl, or data.format=text"
            yield Fault(key, part.format or form, f"text: source={source} gives no records", fix)
    if data.train_tokenizer and len(data.mixture) < 2:  # else it is refused for the mixture's sake
        want = "false for supervised data, whose tokenizer has to know the tokens of the chat template"
        yield Fault("data.train_tokenizer", True, want, "model.tokenizer=FOLDER data.train_tokenizer=false")
    file = template_file(data)
    if file is not None and not file.is_file():
        want = f"a file with a Jinja template, seen from {Path.cwd()}"
        yield Fault(
            "data.chat_template", template, want, "check the path, or null for the tokenizer's own template"
        )


def is_supervised(data: DataConfig) -> bool:
    """Whether any of the data is records of chats or of prompts with completions."""
    return any((part.format or data.format) != "text" for part in data.mixture or [data])


def template_file(data: DataConfig) -> Path | None:
    """The file of `data.chat_template`: from the folder the command was started in, or beside the stack."""
    if data.chat_template is None:
        return None
    given = Path(data.chat_template).expanduser()
    beside_stack = REPO_ROOT / given
    return beside_stack if not given.exists() and beside_stack.exists() else given
