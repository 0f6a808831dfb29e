"""Token ids drawn from the seed, for benchmarks and tests: no text, no tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np

from stack.data.sources.base import Document, SourceRequest, Tally, Unit

BLOCK_TOKENS = 1 << 20


class RandomSource:
    """`data.source=random`: `data.random_tokens` ids below the model's vocabulary, in documents of one
    length."""

    def __init__(self, request: SourceRequest):
        self.num_ids, self.seed = request.vocab, request.seed
        self.num_tokens = request.data.random_tokens
        self.total_bytes = 4 * self.num_tokens
        self.document_tokens = request.data.random_document_tokens or request.data.seq_len

    def identity(self) -> object:
        return ["random", self.num_ids, self.seed, self.num_tokens, self.document_tokens]

    def units(self, size: int, cut: re.Pattern[str] | None, tally: Tally) -> list[Unit]:
        """Items are documents. Four bytes an id, as the largest are stored."""
        count, each = -(-self.num_tokens // self.document_tokens), max(size // 4 // self.document_tokens, 1)
        return [
            Unit(first, min(first + each, count), self._length(first, min(first + each, count)))
            for first in range(0, count, each)
        ]

    def documents(self, unit: Unit, tally: Tally) -> Iterator[Document]:
        for number in range(unit.first, unit.last):
            yield Document(str(number), partial(self._draw, number, self._length(number, number + 1)))

    def check_unchanged(self, unit: Unit | None = None) -> None:
        """Nothing is read."""

    def _length(self, first: int, last: int) -> int:
        return min(last * self.document_tokens, self.num_tokens) - first * self.document_tokens

    def _draw(self, number: int, length: int) -> Iterator[np.ndarray]:
        generator = np.random.default_rng([self.seed, number])
        for begin in range(0, length, BLOCK_TOKENS):
            yield generator.integers(self.num_ids, size=min(BLOCK_TOKENS, length - begin), dtype=np.int64)
