"""Where a long text can be cut so that the ids of its parts, joined, are the ids of the whole.

A whole book or a one-line file of 200 MB is one document. The tokenizer keeps some 100 bytes for each token
of a call, so long text goes in chunks. That is exact only where the tokenizer's pre-tokenisation certainly
splits. For the patterns in SPLIT_PATTERNS it does so in front of

- a space, after anything that no version of Unicode takes for white space or a control: in none of their alternatives
  does a space follow anything but white space;
- a line feed or a Chinese or Japanese mark, after a letter: in none of them does either follow a letter;
- a digit or a mark of ASCII but the apostrophe, after a letter; a letter of ASCII or such a mark, after a digit of ASCII: in
  none of them do letters, digits and marks stand in one match, but for a mark in front of letters. So text without spaces
  has places too: minified code, base64, tables of numbers. Where a token added to the vocabulary holds such a place, its
  character is left out, since these tokens are taken out of the text first.

The left chunk then ends where a match ends whatever follows (their only look-ahead, `\\s+(?!\\S)`, starts at
white space), and the right one starts where a match starts. NFC does not compose over such a place. For any
other tokenizer the answer is None: whole documents only. A text that has no such place for MOST_CHARS is refused, or left
out and counted (`Stretches`).
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

from stack.errors import DataError

CHUNK_CHARS = 1 << 10
"""Small, so that what the tokenizer keeps of a chunk stays in a core's cache: 1.5 times the speed of chunks of 65,536."""

MOST_CHARS = 1 << 24
"""Of text in one piece: some 100 bytes a character, so 1.7 GB of memory for each worker."""

STRETCH_CHARS = 1 << 16
"""Looked at together for places to cut; far below MOST_CHARS, so that what lies between two of them does not matter."""

UNCUTTABLE = "no place to cut"
"""Why a document is left out that has none in MOST_CHARS."""

# Ranges of letters that every version of Unicode in use agrees on: Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic,
# Devanagari, Thai, Georgian, kana, Han, Hangul.
LETTERS = (
    "A-Za-zÀ-ÖØ-öø-ʯΑ-ΡΣ-ώА-я\u0531-\u0556\u0561-\u0586\u05d0-\u05ea\u0621-\u063a\u0641-\u064a\u0671-\u06d3"
    "\u0905-\u0939\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e45\u10d0-\u10f0"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
# White space, controls and marks without width, which some engine may take for white space.
SPACES = r"\s\x00-\x20\x7f-\xa0\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff"
SAFE_CUT = re.compile(f"(?<=[^{SPACES}]) |(?<=[{LETTERS}])[\n，。、！？]")
DIGITS, MARKS = string.digits, string.punctuation.replace("'", "")

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2, SmolLM
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES,  # Qwen 2 and 3
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES,  # Qwen 3.5
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES,  # Llama 3
    _CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,  # Mistral Nemo and later
    _CASED % (_ENGLISH + "?", _ENGLISH + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,  # GPT-4o
}


def _wide_cut(without: str) -> re.Pattern[str]:
    """SAFE_CUT, and between letters, digits and marks of ASCII, but not in front of the characters `without`."""

    def among(characters: str) -> str:
        kept = [re.escape(one) for one in characters if one not in without]
        return f"[{''.join(kept)}]" if kept else r"(?!)"

    after_letter, after_digit = among(DIGITS + MARKS), among(string.ascii_letters + MARKS)
    return re.compile(f"{SAFE_CUT.pattern}|(?<=[{LETTERS}]){after_letter}|(?<=[{DIGITS}]){after_digit}")


WIDE_CUT = _wide_cut("")
"""All safe places of a text without added tokens."""


def safe_cut(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Pattern of the places where a text may be cut for this tokenizer, in front of each match; None:
    nowhere."""
    rules = json.loads(tokenizer.to_str())
    if (rules["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    steps = _flatten(rules["pre_tokenizer"])
    if not any(_splits(step) for step in steps) or not all(
        _splits(step) or _is_local(step) for step in steps
    ):
        return None
    # Tokens added to the vocabulary are taken out of the text first, and could reach over a cut.
    reaching = [
        token for token in rules["added_tokens"]
        if token["rstrip"] or token["single_word"] or SAFE_CUT.search(token["content"], 1)
    ]  # fmt: skip
    if reaching:
        return None
    inside = {
        match.group() for token in rules["added_tokens"] for match in WIDE_CUT.finditer(token["content"], 1)
    }
    return _wide_cut("".join(inside))


def _flatten(step: dict | None) -> list[dict]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step["pretokenizers"] for inner in _flatten(part)]
    return [step]


def _splits(step: dict) -> bool:
    """Whether this step splits at every place that the head of this file tells."""
    if step["type"] == "ByteLevel":  # a space put in front of a chunk would be one too many
        return step["use_regex"] and not step["add_prefix_space"]
    if step["type"] != "Split":
        return False
    return (
        step["pattern"].get("Regex") in SPLIT_PATTERNS
        and step["behavior"] == "Isolated"
        and not step["invert"]
    )


def _is_local(step: dict) -> bool:
    """Whether this step looks at single characters only, so that a cut changes nothing."""
    return step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["add_prefix_space"])


def cut_text(
    blocks: Iterable[str],
    cut: re.Pattern[str] | None,
    size: int = CHUNK_CHARS,
    *,
    where: str = "a document",
) -> Iterator[str]:
    """Text in blocks cut anywhere -> chunks cut at safe places; all of it in one chunk if `cut` is None.

    Chunks have about `size` characters, more where there is no safe place. Each character is looked at a
    bounded number of times, so the time is linear in the text's length. Raises DataError with `where` for more than
    MOST_CHARS, and some, without a safe place; ask `Stretches` before, to leave such a text out.
    """
    held: list[str] = []
    num_held = 0
    for block in blocks:
        for begin in range(0, len(block), size):
            part = block[begin : begin + size]
            if num_held + len(part) > size and cut is not None:
                before = held[-1][-1] if held else ""
                at = _last_cut(before + part, cut) - len(before)
                if at >= 0:
                    yield "".join([*held, part[:at]])
                    held, num_held, part = [], 0, part[at:]
            held.append(part)
            num_held += len(part)
            if num_held > MOST_CHARS + 2 * size:  # it may begin that much ahead of the last safe place
                fix = "set data.bad_text=skip to leave out and count such documents, or part them"
                raise DataError(f"{where}: {_explain_uncuttable()}. Fix: {fix}")
    if held:
        yield "".join(held)


class Stretches:
    """Whether a text, seen block by block, has a stretch of over MOST_CHARS without a place to cut."""

    def __init__(self, cut: re.Pattern[str] | None):
        """cut: as in `cut_text`."""
        self.cut = cut
        self.too_long = False
        self._open, self._before = 0, ""

    def see(self, block: str) -> None:
        for begin in range(0, len(block), STRETCH_CHARS):
            part = block[begin : begin + STRETCH_CHARS]
            text, ahead = self._before + part, len(self._before)
            first = self.cut.search(text) if self.cut is not None else None
            self._open += len(part) if first is None else first.start() - ahead
            self.too_long |= self._open > MOST_CHARS
            if first is not None and self.cut is not None:
                self._open = len(text) - _last_cut(text, self.cut)
            self._before = part[-1]

    def explain(self) -> str:
        return _explain_uncuttable()


def _explain_uncuttable() -> str:
    return (
        f"more than {MOST_CHARS:,} characters without a place where the ids would stay the same if it were cut, such as a "
        "space, and more memory for the tokenizer than a worker should take"
    )


def _last_cut(text: str, cut: re.Pattern[str]) -> int:
    """Start of the last match, or -1. Tries the end of the text first, where there nearly always is one."""
    for window in (32, 256, len(text)):
        found = [match.start() for match in cut.finditer(text, max(0, len(text) - window))]
        if found:
            return found[-1]
    return -1
