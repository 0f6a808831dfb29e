"""Chunks of a long text give the ids of the whole text, for each pre-tokenisation that is listed as safe."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from stack.data import chunks
from stack.data.chunks import (
    LETTERS,
    SAFE_CUT,
    SPLIT_PATTERNS,
    WIDE_CUT,
    Stretches,
    cut_text,
    safe_cut,
)
from stack.errors import DataError

PIECES = [
    *("a", "Bc", "don't", "'s", "'S", "we'LL", "1", "12", "345678", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t"),
    *("...", "!?", "(", "\"", "'", "/", "//\n", "-", "_", "é", "e\u0301", "\u0301", "ß", "Ж", "漢字", "漢字，", "。", "、\n"),
    *("한국어", "ᄒ", "ᅡ", "안녕 ", "ひらがな", "カタ", "😀", "👩\u200d💻", "\u200b", "\u00a0", "\u2028", "\u3000", "\x1c"),
    *("\x85", "\ufeff", "٣", "Ⅷ", "½", "ﬁ", "\ud7ff", "𝒳", "ʰ", "<|endoftext|>", "<x>", "\x00"),
    *("a1", "1a", "1'", "1's", "a's1", "x=", "{\"k\":", "1.5,2", "é1", "1é", "Ab1C", "1\u0301", "a/\n/", "a٣", "٣a", "[1]a"),
    *("ภาษา", "ที่", "เสียง ", "नमस्ते", "क्षि ", "سلام", "سَلَام ", "שלום", "שָׁ", "ქართ", "Հայ", "\u0e33", "\u180e", "\u2060"),
]  # fmt: skip
NASTY = "".join(PIECES) * 2


def random_text(seed: int) -> str:
    generator = random.Random(seed)
    return "".join(generator.choice(PIECES) for _ in range(generator.randrange(1, 60)))


def train(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> Tokenizer:
    """A BPE with many merges over random text, so that a wrong cut shows in the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([random_text(seed) for seed in range(400)], trainer)
    return tokenizer


def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


SAFE = {
    "gpt2": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: train(digits_then_bytes()),
    "nfc": lambda: train(by_pattern(sorted(SPLIT_PATTERNS)[0]), normalizers.NFC()),
    **{f"pattern {n}": (lambda p=p: train(by_pattern(p))) for n, p in enumerate(sorted(SPLIT_PATTERNS))},
}


@pytest.mark.parametrize("name", SAFE)
def test_ids_of_chunks_are_those_of_the_whole(name: str) -> None:
    tokenizer = SAFE[name]()
    cut = safe_cut(tokenizer)
    assert cut is not None
    num_cuts = 0
    for seed in range(1500):
        text = random_text(seed)
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        chunks = list(cut_text([text], cut, size=4))
        assert "".join(chunks) == text
        joined = [one for chunk in chunks for one in tokenizer.encode(chunk, add_special_tokens=False).ids]
        assert joined == whole, chunks
        num_cuts += len(chunks) - 1
    assert num_cuts > 500


@pytest.mark.parametrize("name", SAFE)
def test_every_safe_place_is_a_split_of_its_own(name: str) -> None:
    """Not only where chunks happen to end: each match splits the text without a change in the ids."""
    tokenizer = SAFE[name]()
    cut = safe_cut(tokenizer)
    assert cut is not None
    num_wide = 0
    for text in [NASTY, *(random_text(seed) for seed in range(150))]:
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        for match in cut.finditer(text):
            left, right = text[: match.start()], text[match.start() :]
            ids = [tokenizer.encode(part, add_special_tokens=False).ids for part in (left, right)]
            assert ids[0] + ids[1] == whole, (left[-5:], right[:5])
            num_wide += not SAFE_CUT.match(text, match.start())
    assert num_wide > 300


def test_an_added_token_is_not_cut() -> None:
    tokenizer = train(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken("[INST1]"), AddedToken("tool_call2me")])
    cut = safe_cut(tokenizer)
    assert cut is not None
    text = "a[INST1]b1tool_call2me,<|endoftext|>x"
    assert [text[match.start()] for match in cut.finditer(text)] == ["[", "t", ","]
    assert "".join(cut_text(["b64/x1Y2" * 4000], cut, size=100)) == "b64/x1Y2" * 4000


@pytest.mark.parametrize(
    "text", ['{"key":12,"other":[3,4]},' * 400, "QmFzZTY0IGVuY29kZWQ0dGV4dA" * 400, "0.5,1.25," * 900]
)
def test_text_without_spaces_has_places(text: str) -> None:
    assert max(map(len, cut_text([text], WIDE_CUT, size=100))) <= 200


UNSAFE = {
    "no pre-tokeniser": lambda: Tokenizer(models.BPE()),
    "prefix space": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "whitespace joined": lambda: train(by_pattern(r"\w+ ?|\s+|[^\w\s]+")),
    "lower case": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
    "metaspace": lambda: train(pre_tokenizers.Metaspace()),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_other_tokenizers_take_documents_whole(name: str) -> None:
    cut = safe_cut(UNSAFE[name]())
    assert cut is None
    assert list(cut_text(["ab c", "d e f"], cut, size=2)) == ["ab cd e f"]


@pytest.mark.parametrize(
    "token",
    [AddedToken("two words"), AddedToken("<right>", rstrip=True), AddedToken("word", single_word=True)],
)
def test_added_tokens_that_reach_over_a_cut(token: AddedToken) -> None:
    tokenizer = train(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([token])
    assert safe_cut(tokenizer) is None


def test_chunks_are_bounded_and_blocks_do_not_matter() -> None:
    text = "some words and lines\n" * 500
    by_block = list(cut_text([text], SAFE_CUT, size=100))
    assert max(map(len, by_block)) <= 200 and "".join(by_block) == text
    odd = list(cut_text(re.findall(r"(?s).{1,7}", text), SAFE_CUT, size=100))
    assert "".join(odd) == text and max(map(len, odd)) <= 200


def test_letters_are_letters_and_join_nothing() -> None:
    for begin, end in re.findall(r"(.)-(.)", LETTERS):
        for code in range(ord(begin), ord(end) + 1):
            assert unicodedata.category(chr(code)).startswith("L"), hex(code)


@pytest.mark.parametrize("words", ["ที่เสียง", "नमस्ते", "سلام", "שלום", "ქართ", "Հայերեն"])
def test_chunks_of_other_scripts_are_bounded(words: str) -> None:
    assert max(map(len, cut_text([f"{words} " * 500], SAFE_CUT, size=100))) <= 200


def test_a_text_without_a_place_is_refused_where_it_grows_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MOST_CHARS", 1000)
    taken = []
    blocks = (taken.append(1) or "ACGT" * 25 for _ in range(100))
    with pytest.raises(DataError, match=r"dna\.txt: more than 1,000 characters without a place"):
        list(cut_text(blocks, SAFE_CUT, size=100, where="dna.txt"))
    assert len(taken) == 13
    assert "".join(cut_text(["ACGT " * 1000], SAFE_CUT, size=100)) == "ACGT " * 1000


@pytest.mark.parametrize("block", [1, 7, 300, 10_000])
@pytest.mark.parametrize("piece", [3, 100])
def test_stretches_agree_with_the_chunks(block: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that passes is never refused when it is cut."""
    monkeypatch.setattr(chunks, "MOST_CHARS", 1000)
    monkeypatch.setattr(chunks, "STRETCH_CHARS", piece)
    seen = set()
    for length in (*range(990, 1010), 1300):
        text = f"{'a b ' * 50}{'x' * length} {'y' * 990} end"
        blocks = [text[at : at + block] for at in range(0, len(text), block)]
        stretches = Stretches(SAFE_CUT)
        for one in blocks:
            stretches.see(one)
        assert stretches.too_long == (length >= 1000), length  # with the space in front of it
        seen.add(stretches.too_long)
        if not stretches.too_long:
            assert "".join(cut_text(blocks, SAFE_CUT, size=100)) == text
    assert seen == {True, False}


def test_text_without_a_place_stays_whole_in_linear_work() -> None:
    """Work is counted, not timed: characters that the search looks at, for a text of one word."""

    class Counting:
        looked_at = 0

        def finditer(self, text: str, start: int) -> list[re.Match[str]]:
            self.looked_at += len(text) - start
            return []

    work = []
    for length in (20_000, 40_000):
        counting = Counting()
        assert list(cut_text(["x" * length], counting, size=100)) == ["x" * length]  # pyright: ignore[reportArgumentType]
        work.append(counting.looked_at)
    assert work[1] == pytest.approx(2 * work[0], rel=0.02) and work[0] < 5 * 20_000
