"""The tokenizer: what goes in comes out, and nothing is put in that the text does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from stack.data.tokenizer import END_OF_TEXT, TextEncoder, check_vocabulary, load_tokenizer, train_tokenizer
from stack.errors import ConfigError, DataError

TEXTS = [
    "def f(x):\n    return x\n" * 20,
    "한국어 문장입니다.",
    "中文，没有空格。",
    "emoji 👩\u200d💻 e\u0301 é \ufeff\u2028 \x00\r\n\t  end ",
]


def test_any_text_comes_back_unchanged(tmp_path: Path) -> None:
    train_tokenizer(TEXTS[:1], 400).save_pretrained(tmp_path)
    encoder = TextEncoder(load_tokenizer(str(tmp_path)))
    assert encoder.eos_id == 0 and encoder.num_ids <= 400
    for text, ids in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        assert encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
        assert 0 not in ids, "no end of text is added"


def test_training_gives_the_same_tokenizer_again() -> None:
    texts = [Path(__file__).read_text()]
    first, second = (TextEncoder(train_tokenizer(texts, 500)).fingerprint() for _ in range(2))
    assert first == second != TextEncoder(train_tokenizer(texts, 400)).fingerprint()


def test_no_bos_is_added_and_no_text_is_cut_off() -> None:
    """A tokenizer that adds BOS by itself, and was saved with truncation and padding on."""
    backend = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(2)
    backend.enable_padding(length=6)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    encoder = TextEncoder(tokenizer)
    assert [ids.tolist() for ids in encoder.encode(["a b a b", "a"])] == [[1, 2, 1, 2], [1]]
    assert encoder.eos_id is None and any("whole" in note for note in encoder.notes())


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    encoder = TextEncoder(train_tokenizer(TEXTS, 300))
    check_vocabulary(encoder, encoder.num_ids, "model.tokenizer", "t")
    check_vocabulary(encoder, None, "model.tokenizer", "t")
    with pytest.raises(
        ConfigError, match=rf"at most {encoder.num_ids - 1} ids.*this one has {encoder.num_ids}"
    ):
        check_vocabulary(encoder, encoder.num_ids - 1, "model.tokenizer", "t")


def test_a_vocabulary_below_all_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer(TEXTS, 256)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("someone/some-model", "the hub cannot be reached"),
        ("FOLDER", "the folder holds no tokenizer"),
        ("BROKEN", "the folder holds no tokenizer"),
    ],
)
def test_a_missing_tokenizer_is_one_clear_error(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "tokenizer.json").write_text("{")
    (tmp_path / "FOLDER").mkdir()
    given = str(tmp_path / path) if path.isupper() else path
    with pytest.raises(DataError, match=rf"{message}.*Fix: set model\.tokenizer"):
        load_tokenizer(given)


def test_end_of_text_spelled_in_a_document_is_reported() -> None:
    encoder = TextEncoder(train_tokenizer(TEXTS, 300))
    assert 0 in encoder.control_ids
    assert 0 in encoder.encode([f"a {END_OF_TEXT} b"])[0]
