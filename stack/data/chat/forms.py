"""The common forms of supervised records -> one of two: a Conversation for the chat template, or a prompt with its
completion as plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stack.config.schema_data import DataConfig

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a turn may have its thinking; templates get it under the first."""

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""What `from` says there, and the role it means. `function_call` holds the calls as JSON."""

COLUMN_SOURCES = ("parquet", "hf")
"""Sources of columns, where all records have the fields of any: one that a record lacks comes as null."""

Message = dict[str, Any]


class BadRecord(Exception):
    """A record that cannot be learned from as it stands.

    reason: in few words, the same for all records of its kind, to be counted. detail: what is wrong with this one, and
    how to mend it where the cause is a setting.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Pickles by its parts, on its way from a worker process."""
        return type(self), (self.reason, self.detail)


@dataclass(frozen=True)
class Conversation:
    """Turns for the chat template."""

    messages: list[Message]
    """Each with a role of ROLES and its content as text. Other keys are as the record has them, without nulls."""

    tools: list[dict[str, Any]] = field(default_factory=list)

    first: int = 0
    """Turns before this one are a prompt, and no targets whoever says them."""


@dataclass(frozen=True)
class Completion:
    """Plain text behind plain text, without turns."""

    prompt: str
    completion: str


def read_record(record: dict[str, Any], data: DataConfig) -> Conversation | Completion:
    """A record in the form that `data.format` names. Raises BadRecord."""
    if data.source in COLUMN_SOURCES:  # only there: a null that stands in JSON was written by someone
        record = {name: _without_nulls(value) for name, value in record.items()}
    return FORMS[data.format](record, data)


def _messages(record: dict[str, Any], data: DataConfig) -> Conversation:
    name = data.messages_field or "messages"
    return Conversation(_turns(_take(record, name), name), _tools(record, data))


def _sharegpt(record: dict[str, Any], data: DataConfig) -> Conversation:
    name = data.messages_field or "conversations"
    turns = []
    system = record.get("system")
    if system:
        turns.append({"role": "system", "content": system})
    for number, turn in enumerate(_list(_take(record, name), name)):
        where = f"{name}[{number}]"
        source, value = (_take(_object(turn, where), key, where) for key in ("from", "value"))
        role = SHAREGPT_ROLES.get(source) if isinstance(source, str) else None
        if role is None:
            raise _unknown_role(where, "from", source, SHAREGPT_ROLES)
        if source == "function_call":
            said = {"content": "", "tool_calls": _calls(value, f"{where}.value")}
        else:
            said = {"content": value}
        turns.append({"role": role, **said, "weight": turn.get("weight")})
    return Conversation(_turns(turns, name), _tools(record, data))


def _alpaca(record: dict[str, Any], data: DataConfig) -> Conversation:
    """instruction, input behind it on a line of its own, output; system and history (pairs) where they are given."""
    instruction, output = _text(record, "instruction"), _text(record, "output")
    given = _text(record, "input") if record.get("input") else ""
    turns = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    history = _list(record["history"], "history") if record.get("history") else []
    for number, pair in enumerate(history):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise _wrong_type(f"history[{number}]", pair, "a pair of instruction and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns.append({"role": "user", "content": "\n".join(filter(None, [instruction, given]))})
    turns.append({"role": "assistant", "content": output})
    return Conversation(_turns(turns, "the record's turns"), _tools(record, data))


def _prompt_completion(record: dict[str, Any], data: DataConfig) -> Conversation | Completion:
    prompt, completion = _take(record, "prompt"), _take(record, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(_unicode(prompt, "prompt"), _unicode(completion, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        detail = "prompt and completion are to be both text or both lists of messages"
        raise BadRecord("wrong type", f"{detail}, and are {_kind(prompt)} and {_kind(completion)}")
    before = _turns(prompt, "prompt") if prompt else []
    return Conversation(before + _turns(completion, "completion"), _tools(record, data), first=len(before))


FORMS: dict[str, Callable[[dict[str, Any], DataConfig], Conversation | Completion]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
}


def _without_nulls(value: Any) -> Any:
    """The value without the keys of its objects that hold null, however deep."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _turns(given: Any, name: str) -> list[Message]:
    """Messages as templates take them. Raises BadRecord."""
    turns = [_message(turn, f"{name}[{number}]") for number, turn in enumerate(_list(given, name))]
    if not turns:
        raise BadRecord("no messages", f"{name} is empty")
    return turns


def _message(given: Any, where: str) -> Message:
    turn = {key: value for key, value in _object(given, where).items() if value is not None}
    role = _take(turn, "role", where)
    if role not in ROLES:
        raise _unknown_role(where, "role", role, ROLES)
    calls = turn.get("tool_calls")
    if calls:
        turn["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    elif "tool_calls" in turn:
        del turn["tool_calls"]  # an empty list, which some templates take for calls
    said = calls or any(turn.get(name) for name in REASONING)
    content = turn.get("content", "" if role == "assistant" and said else None)
    if content is None:
        raise BadRecord("no content", f"{where} ({role}) has content null or none")
    turn["content"] = _content(content, f"{where}.content")
    if turn.get("weight", 1) not in (0, 1):
        raise _wrong_type(f"{where}.weight", turn["weight"], "1, or 0 for a turn that is not to be learned")
    return turn


def _content(given: Any, where: str) -> str:
    """Text, or a list of parts of type text."""
    if isinstance(given, str):
        return _unicode(given, where)
    if not isinstance(given, list):
        raise _wrong_type(where, given, "text")
    parts = []
    for number, part in enumerate(given):
        kind = _object(part, f"{where}[{number}]").get("type", "text")
        if kind != "text":
            detail = f"{where}[{number}] is of type {kind!r}; only text is learned from"
            raise BadRecord("content is no text", detail)
        parts.append(_text(part, "text", f"{where}[{number}]"))
    return "".join(parts)


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls as templates take them: `function` with a name, and arguments as an object."""
    calls = []
    given = _json(given, where) if isinstance(given, str) else given
    for number, call in enumerate(_list([given] if isinstance(given, dict) else given, where)):
        call = _object(call, f"{where}[{number}]")
        call = call if "function" in call else {"type": "function", "function": call}
        function = dict(_object(call["function"], f"{where}[{number}].function"))
        _text(function, "name", f"{where}[{number}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # templates print an object; text would come out quoted once more
            function["arguments"] = _json(arguments, f"{where}[{number}].function.arguments")
        calls.append({**call, "function": function})
    return calls


def _tools(record: dict[str, Any], data: DataConfig) -> list[dict[str, Any]]:
    given = record.get(data.tools_field)
    if not given:
        return []
    given = _json(given, data.tools_field) if isinstance(given, str) else given
    return [
        _object(tool, f"{data.tools_field}[{n}]") for n, tool in enumerate(_list(given, data.tools_field))
    ]


def _take(holder: dict[str, Any], name: str, where: str = "") -> Any:
    value = holder.get(name)
    if value is None:
        found = (
            f"is null, among {', '.join(map(str, holder))}"
            if name in holder
            else f"is not among {', '.join(map(str, holder))}"
        )
        raise BadRecord("missing field", f"field {name!r} {found[:200]}{f' of {where}' if where else ''}")
    return value


def _text(holder: dict[str, Any], name: str, where: str = "") -> str:
    value = _take(holder, name, where)
    place = f"{where}.{name}" if where else name
    if not isinstance(value, str):
        raise _wrong_type(place, value, "text")
    return _unicode(value, place)


def _unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        code = ord(text[error.start])
        raise BadRecord(
            "not Unicode", f"{where}: U+{code:04X} at character {error.start} is half a pair"
        ) from error
    return text


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRecord("not JSON", f"{where}: {error}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong_type(where, value, "an object")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong_type(where, value, "a list")
    return value


def _wrong_type(where: str, value: Any, want: str) -> BadRecord:
    return BadRecord("wrong type", f"{where} is {_kind(value)}, expected {want}")


def _unknown_role(where: str, key: str, role: Any, known: Any) -> BadRecord:
    return BadRecord("unknown role", f"{where} has {key} {role!r:.80}, expected one of {', '.join(known)}")


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "text",
        dict: "an object",
        list: "a list",
    }
    return names.get(type(value), type(value).__name__)
