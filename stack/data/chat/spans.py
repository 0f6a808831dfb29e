"""A text and its targets, as characters -> ids and which of them are targets."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from stack.data.chat.forms import BadRecord

SAMPLES = (("x ", "y"), ("x", "y"), ("x", " y"), ("x\n", "\ny"))
"""Texts in two parts; a tokenizer that gives back each of them from its parts' ids can be given a text in parts."""


class SpanEncoder:
    """Texts with targets through one tokenizer.

    A text is tokenised in parts, cut where each target begins, since a model that is asked with the text up to there
    has to say the rest in tokens of its own: a blank line that is half header and half content is two tokens then, and
    the header's tokens do not hang on what follows. A tokenizer that would put a blank before each part (Llama 2's)
    gets the text whole.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._in_parts = all(
            backend.decode(self._encode(list(parts))[0].tolist(), skip_special_tokens=False) == "".join(parts)
            for parts in SAMPLES
        )

    def encode(self, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [tokens] and targets bool [tokens] of a text whose targets are the characters `spans`, in order.

        Nothing is put before or behind it. Raises BadRecord if a token reaches over the begin of a target.
        """
        edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
        cuts = sorted({0, *edges[:, 0].tolist(), len(text)}) if self._in_parts else [0, len(text)]
        ids, offsets = self._encode([text[low:high] for low, high in zip(cuts[:-1], cuts[1:], strict=True)])
        first, behind = (np.searchsorted(offsets[:, 0], edge) for edge in edges.T)
        targets = np.zeros(len(ids), dtype=bool)
        for (begin, _), low, high in zip(spans, first, behind, strict=True):
            if low and offsets[low - 1, 1] > begin:
                joined = f"{text[max(begin - 10, 0) : begin]!r} and {text[begin : begin + 10]!r}"
                raise BadRecord(
                    "token across the begin of a turn",
                    f"the tokenizer joins {joined} into one token, over the begin of a turn",
                )
            targets[low:high] = True
        return ids, targets

    def _encode(self, parts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids [tokens] of the parts, joined, and the characters [tokens, 2] of the joined text that each stands for."""
        ids, offsets, begin = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)], 0
        for part in parts:
            encoding = self._backend.encode(part, add_special_tokens=False)
            ids.append(np.array(encoding.ids, dtype=np.int64))
            offsets.append(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + begin)
            begin += len(part)
        return np.concatenate(ids), np.concatenate(offsets)
