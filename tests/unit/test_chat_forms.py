"""The common forms of records: what each becomes, and what is said of one that is wrong."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from stack.config.schema_data import DataConfig
from stack.data.chat.forms import BadRecord, Completion, Conversation, read_record

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": 1}}}


def read(form: str, record: Any, **data: Any) -> Conversation | Completion:
    return read_record(record, DataConfig(**{"format": form, **data}))


@pytest.mark.parametrize(
    ("form", "record", "turns"),
    [
        ("messages", {"messages": [S, U, A], "id": 7}, [S, U, A]),
        ("messages", {"messages": ({**U, "name": None, "tool_calls": None}, {**A, "tool_calls": []})}, [U, A]),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, A]}, [U, A]),
        ("messages", {"messages": [{**U, "name": "Kim"}, A]}, [{**U, "name": "Kim"}, A]),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [U, A]),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0}]},
         [U, {**A, "weight": 0}]),
        ("sharegpt", {"system": "s", "conversations": [{"from": "user", "value": "q"}]}, [S, U]),
        ("sharegpt", {"conversations": [{"from": "system", "value": "s"}, {"from": "observation", "value": "a"}]},
         [S, {"role": "tool", "content": "a"}]),
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}, [U, A]),
        ("alpaca", {"instruction": "q", "input": None, "output": ""}, [U, {**A, "content": ""}]),
        ("alpaca", {"instruction": "do", "input": "this", "output": "a"}, [{"role": "user", "content": "do\nthis"}, A]),
        ("alpaca", {"system": "s", "history": [["q", "a"]], "instruction": "q", "output": "a"}, [S, U, A, U, A]),
        ("prompt_completion", {"prompt": [U], "completion": [A]}, [U, A]),
        ("prompt_completion", {"prompt": [], "completion": [U, A]}, [U, A]),
    ],
)  # fmt: skip
def test_forms(form: str, record: dict, turns: list) -> None:
    before = json.dumps(record)
    found = read(form, record)
    assert isinstance(found, Conversation) and found.messages == turns and found.tools == []
    assert found.first == (len(record["prompt"]) if form == "prompt_completion" else 0)
    assert json.dumps(record) == before, "the record itself stays as it is"


def test_plain_prompt_and_completion_keep_every_character() -> None:
    assert read("prompt_completion", {"prompt": " q \n", "completion": " a "}) == Completion(" q \n", " a ")


def test_other_field_names() -> None:
    found = read(
        "messages", {"turns": [U, A], "functions": [TOOL]}, messages_field="turns", tools_field="functions"
    )
    assert found == Conversation([U, A], [TOOL])


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'], ids=["object", "text"])
def test_tools_and_calls(tools: Any, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert read("messages", {"messages": [U, turn], "tools": tools}) == Conversation([U, said], [TOOL])
    bare = json.dumps({"name": "look", "arguments": {"x": 1}})
    spoken = [{"from": "human", "value": "q"}, {"from": "function_call", "value": bare}]
    assert read("sharegpt", {"conversations": spoken, "tools": tools}) == Conversation([U, said], [TOOL])


def test_nulls_that_only_fill_columns_are_taken_out() -> None:
    """Parquet gives all calls and tools the fields of any; in JSON a null was written by someone."""
    arguments = {"x": 1, "of": {"y": None}, "each": [{"z": None}]}
    calls = [{"function": {"name": "look", "arguments": {**arguments, "other": None}}}]
    tool = {"function": {"name": "look", "parameters": {"x": {"type": "int"}, "other": None}}}
    record = {"messages": [U, {"role": "assistant", "content": None, "tool_calls": calls}], "tools": [tool]}
    for source in ("parquet", "hf", "jsonl"):
        found = read("messages", record, source=source)
        assert isinstance(found, Conversation)
        given = found.messages[1]["tool_calls"][0]["function"]["arguments"]
        if source == "jsonl":
            assert given == {**arguments, "other": None} and found.tools == [tool]
        else:
            assert given == {"x": 1, "of": {}, "each": [{}]}
            assert found.tools == [{"function": {"name": "look", "parameters": {"x": {"type": "int"}}}}]


@pytest.mark.parametrize(
    ("form", "record", "reason", "detail"),
    [
        ("messages", {"text": "x"}, "missing field", "'messages' is not among text"),
        ("messages", {"messages": None}, "missing field", "'messages' is null"),
        ("messages", {"messages": []}, "no messages", "messages is empty"),
        ("messages", {"messages": "q"}, "wrong type", "messages is text, expected a list"),
        ("messages", {"messages": {"role": "user"}}, "wrong type", "messages is an object, expected a list"),
        ("messages", {"messages": [U, "a"]}, "wrong type", r"messages\[1\] is text, expected an object"),
        ("messages", {"messages": [{"content": "q"}]}, "missing field", r"'role' is not among content of messages\[0\]"),
        ("messages", {"messages": [U, {**A, "role": "humn"}]}, "unknown role", r"\[1\] has role 'humn', expected one of system"),
        ("messages", {"messages": [U, {**A, "content": None}]}, "no content", r"messages\[1\] \(assistant\)"),
        ("messages", {"messages": [{"role": "user", "content": None, "tool_calls": [CALL]}]}, "no content", "user"),
        ("messages", {"messages": [{**U, "content": 3}]}, "wrong type", r"\[0\]\.content is a number, expected text"),
        ("messages", {"messages": [{**U, "content": [{"type": "image", "url": "x"}]}]}, "content is no text", "'image'"),
        ("messages", {"messages": [{**U, "content": [{"type": "text", "value": "x"}]}]}, "missing field", r"'text' .* of m"),
        ("messages", {"messages": [U, {**A, "weight": 0.5}]}, "wrong type", r"messages\[1\]\.weight is a number, expected 1"),
        ("messages", {"messages": [{**U, "content": "\ud800"}]}, "not Unicode", r"U\+D800 at character 0"),
        ("messages", {"messages": [{**A, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "not JSON",
         r"tool_calls\[0\]\.function\.arguments"),
        ("messages", {"messages": [{**A, "tool_calls": [{"function": {}}]}]}, "missing field", "'name'"),
        ("messages", {"messages": [U, A], "tools": "["}, "not JSON", "tools"),
        ("messages", {"messages": [U, A], "tools": [3]}, "wrong type", r"tools\[0\] is a number"),
        ("sharegpt", {"conversations": [{"from": "bot", "value": "a"}]}, "unknown role", "from 'bot'.*human.*gpt"),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, "missing field", "'value' is not among from"),
        ("alpaca", {"instruction": "q"}, "missing field", "'output' is not among instruction"),
        ("alpaca", {"instruction": ["q"], "output": "a"}, "wrong type", "instruction is a list, expected text"),
        ("alpaca", {"instruction": "q", "output": "a", "history": [["q"]]}, "wrong type", r"history\[0\]"),
        ("prompt_completion", {"prompt": "q", "completion": [A]}, "wrong type", "are text and a list"),
        ("prompt_completion", {"prompt": "q"}, "missing field", "'completion'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(form: str, record: dict, reason: str, detail: str) -> None:
    with pytest.raises(BadRecord, match=detail) as caught:
        read(form, record)
    assert caught.value.reason == reason
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.reason, again.detail) == (reason, caught.value.detail), "it comes from a worker process"


@pytest.mark.parametrize("form", ["messages", "sharegpt", "alpaca", "prompt_completion"])
def test_no_record_raises_anything_else(form: str) -> None:
    """Every small change of a good record is read or is a BadRecord."""
    good = {
        "messages": [U, {"role": "assistant", "tool_calls": [CALL]}],
        "conversations": [{"from": "function_call", "value": '{"name": "f"}'}],
        "instruction": "q", "output": "a", "input": "x", "history": [["q", "a"]], "system": "s", "tools": [TOOL],
        "prompt": [U], "completion": [A],
    }  # fmt: skip
    read(form, good)
    wrong: list[Any] = [None, 3, True, "x", "\ud800", [], {}, [3], [{}], [[]], {"a": 1}, 1.5]
    tried = refused = 0
    for path in _paths(good):
        for value in wrong:
            try:
                read(form, _replaced(good, path, value))
            except BadRecord:
                refused += 1
            tried += 1
    assert tried > refused > 30


def _paths(value: Any, path: tuple = ()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in items for deeper in _paths(item, (*path, key)))][not path :]


def _replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy
