"""Token ids drawn from the seed, for benchmarks and tests: no text, no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from stack.data.sources.base import Document, SourceRequest, Tally

BLOCK_TOKENS = 1 << 20


class RandomSource:
    """`data.source=random`: `data.random_tokens` ids below the model's vocabulary, in documents of one
    length."""

    total_bytes = 0

    def __init__(self, request: SourceRequest):
        self.num_ids, self.seed = request.vocab, request.seed
        self.num_tokens = request.data.random_tokens
        self.document_tokens = request.data.random_document_tokens or request.data.seq_len

    def identity(self) -> object:
        return ["random", self.num_ids, self.seed, self.num_tokens, self.document_tokens]

    def documents(self, tally: Tally) -> Iterator[Document]:
        del tally  # nothing can be left out
        for number, begin in enumerate(range(0, self.num_tokens, self.document_tokens)):
            length = min(self.document_tokens, self.num_tokens - begin)
            yield Document(str(number), partial(self._draw, number, length))

    def _draw(self, number: int, length: int) -> Iterator[np.ndarray]:
        generator = np.random.default_rng([self.seed, number])
        for begin in range(0, length, BLOCK_TOKENS):
            yield generator.integers(self.num_ids, size=min(BLOCK_TOKENS, length - begin), dtype=np.int64)
