"""`preview=N` of launch/prepare.py: what is shown is what the model will see."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stack.config.schema_data import DataConfig, MixturePart
from stack.data.command import take_command
from stack.data.preview import show_preview
from stack.errors import ConfigError, DataError
from tests.unit.chat_rig import FAMILIES

CHATS = [
    [("user", "안녕 👩\u200d💻?"), ("assistant", "One\nTwo")],
    [("user", "nobody answers")],
    [("user", "x" * 3000), ("assistant", "done")],
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(data: DataConfig, count: int, tokenizer: str | None = None, out: io.StringIO | None = None) -> str:
    out = out or io.StringIO()
    show_preview(data, count, tokenizer_path=tokenizer, model_vocab=None, seed=1, out=out)
    return out.getvalue()


@pytest.fixture
def chats(tmp_path: Path) -> tuple[DataConfig, str]:
    records = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in CHATS]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = FAMILIES["chatml"].save(tmp_path / "tokenizer")
    path, store = str(tmp_path / "c.jsonl"), str(tmp_path / "store")
    return DataConfig(name="chat", source="jsonl", format="messages", path=path, store=store), tokenizer


def test_chats_show_what_is_learned_with_ids_and_boundaries(
    chats: tuple[DataConfig, str], tmp_path: Path
) -> None:
    text = shown(chats[0], 2, chats[1])
    first, second = re.split(r"═══ document \d of chat, c\.jsonl:", text)[1:]
    rows = [line.split(" │ ") for line in first.splitlines()[1:]]
    assert "".join(row[1] for row in rows if len(row) == 2) == (
        "<|im_start|>user⏎안녕 👩\\u200d💻?<|im_end|>⏎<|im_start|>assistant⏎⟦One⏎⟧⟦Two<|im_end|>⟧⏎"
    )
    ids = [int(number) for row in rows if len(row) == 2 for number in row[0].split()[1:]]
    assert f"1: {len(ids)} tokens" in first and second.startswith("3: ")
    assert "left out before the last one, no assistant turn: 1, first" in text and "line 2" in text
    assert "tokens, 0 of them learned" in second, "the middle of a long one is counted, not printed"
    assert "⟦done<|im_end|>⟧" in second and len(second.splitlines()) < 90
    assert not (tmp_path / "store").exists(), "nothing is prepared"


def test_forged_control_tokens_are_told(chats: tuple[DataConfig, str]) -> None:
    assert "note:" not in shown(chats[0], 2, chats[1]).partition("═══")[2]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    Path(str(chats[0].path)).write_text(json.dumps({"messages": turns}) + "\n")
    assert "note: a record whose content spells out control tokens" in shown(chats[0], 1, chats[1])


def test_colours_are_for_terminals_that_want_them(
    chats: tuple[DataConfig, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = shown(chats[0], 1, chats[1], Terminal())
    assert (
        "\x1b[32mOne⏎\x1b[0m" in coloured and "\x1b[2m<|im_start|>user⏎" in coloured and "⟦" not in coloured
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(chats[0], 1, chats[1], Terminal())


def test_a_bad_record_stops_it_or_is_counted(chats: tuple[DataConfig, str]) -> None:
    data, tokenizer = chats
    Path(str(data.path)).write_text('{"messages": [{"role": "humn", "content": "x"}]}\n')
    with pytest.raises(DataError, match=r"line 1.*'humn'.*bad_text=skip"):
        shown(data, 1, tokenizer)
    data.bad_text = "skip"
    assert "0 documents shown" in shown(data, 1, tokenizer) and "unknown role: 1" in shown(data, 1, tokenizer)


def text_data(folder: Path, **more: Any) -> DataConfig:
    (folder / "a.txt").write_text("One line.\nAnother line.\n" * 3)
    (folder / "b.txt").write_text("word " * 10_000)
    return DataConfig(**{"source": "text", "path": str(folder / "*.txt"), "store": str(folder / "s"), **more})


def test_plain_text_is_learned_but_for_its_first_token(tmp_path: Path) -> None:
    data = text_data(tmp_path, train_tokenizer=True, vocab_size=300)
    text = shown(data, 2)
    assert "note: ids are of a stand-in" in text and "<|endoftext|>⟧" in text
    assert re.search(r"a\.txt: (\d+) tokens, (\d+) learned", text)
    assert " │ On⟦e⟧" in text or " │ O⟦ne" in text or re.search(r" │ \w+⟦", text)
    assert "b.txt: its first" in text, "only the beginning of a long text is read"
    tokenizer = FAMILIES["chatml"].save(tmp_path / "tokenizer")
    assert "<|im_end|>⟧" in shown(text_data(tmp_path), 1, tokenizer), (
        "the end of text that the run puts there"
    )
    assert "<|im_end|>" not in shown(text_data(tmp_path, append_eos=False), 1, tokenizer)


def test_every_part_of_a_mixture_and_ids_without_a_tokenizer(tmp_path: Path) -> None:
    data = text_data(tmp_path, train_tokenizer=True, vocab_size=300)
    data.mixture = [MixturePart(name="prose", weight=1), MixturePart(name="noise", source="random", weight=1)]
    text = shown(data, 1)
    assert "document 1 of prose" in text and "document 1 of noise" in text


@pytest.mark.parametrize("value", ["0", "x", "-1", ""])
def test_its_argument(value: str) -> None:
    with pytest.raises(ConfigError, match=r"preview.*a number of documents from 1"):
        take_command([f"preview={value}"])
    command, rest = take_command(["+exp=quickstart", "preview=3"])
    assert command.preview == 3 and rest == ["+exp=quickstart"]
