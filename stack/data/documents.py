"""The documents of a store that one part reads, training or evaluation, found block by block.

Which documents they are is one bit each, and of each block of documents only its totals are kept: ten million documents
take 1.25 MB. Their boundaries stay in the store's memory map and are read a block at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stack.data.store import TokenStore

BLOCK = 1 << 14
"""Documents in a block: 128 kB of boundaries, read in well under a millisecond."""

SCAN_TOKENS = 1 << 22
"""Places of a target mask looked at in one go, which takes 32 MB."""

GAP_TOKENS = 4096  # places between two stretches that are read rather than jumped over

CACHED_DOCUMENTS = 1 << 18  # whose boundaries are kept at hand: 4 MB
RELEASE_BLOCKS = 64  # blocks after which the pages of a memory map that were read are let go of

TOO_LONG, NO_TARGET = "longer than a row", "without a target"
"""Why documents are dropped."""


@dataclass
class Dropped:
    """What was left out for one reason."""

    count: int = 0
    tokens: int = 0


class Documents:
    """Documents of one part of a store, in the store's order.

    A document's place decides whether it is held out, not its number, so that it stays where it is when others are added.
    The first document is always for training, so that a single book is not held out whole. Of a store with a target mask,
    documents without a target are dropped.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        held_out: bool = False,
        eval_fraction: float = 0.0,
        longest: int | None = None,
        block: int = BLOCK,
    ):
        """held_out: the documents for evaluation, a share of `eval_fraction`, in place of those for training. longest:
        documents with more tokens are dropped. block: documents looked at together, a multiple of 8."""
        self.store, self.block_size = store, block
        self.is_masked = store.read_targets(0, 0) is not None
        self.num_documents = self.num_tokens = self.num_targets = 0
        self.dropped = {TOO_LONG: Dropped(), NO_TARGET: Dropped()}
        self.num_blocks = -(-store.num_documents // block)
        self.block_tokens = np.zeros(self.num_blocks + 1, np.int64)
        """Tokens ahead of each block, and of all."""

        self._bits = np.zeros(-(-store.num_documents // 8), np.uint8)
        self._threshold = np.uint64(int(eval_fraction * 2.0**64))
        self._held_out, self._longest = held_out, longest
        if not held_out or eval_fraction:
            self._choose()
        self.block = lru_cache(max(1, CACHED_DOCUMENTS // block))(self._block)

    def _choose(self) -> None:
        for index in range(self.num_blocks):
            first, last = self._bounds(index)
            offsets = np.array(self.store.offsets[first : last + 1])
            lengths = np.diff(offsets)
            kept = self._of_this_part(first, last)
            if self._longest is not None:
                kept = self._drop(TOO_LONG, kept, lengths > self._longest, lengths)
            if self.is_masked:
                targets = np.zeros(len(lengths), np.int64)
                # The first token of a document is predicted from nothing.
                targets[kept] = count_targets(self.store, offsets[:-1][kept] + 1, offsets[1:][kept])
                kept = self._drop(NO_TARGET, kept, targets == 0, lengths)
                self.num_targets += int(targets[kept].sum())
            self._bits[first // 8 : -(-last // 8)] = np.packbits(kept)
            self.num_documents += int(np.count_nonzero(kept))
            self.num_tokens += int(lengths[kept].sum())
            self.block_tokens[index + 1] = self.num_tokens
            self.let_go(index)
        if not self.is_masked:
            self.num_targets = self.num_tokens - self.num_documents

    def _of_this_part(self, first: int, last: int) -> np.ndarray:
        if not self._threshold:
            return np.ones(last - first, bool)
        held_out = np.asarray(self.store.places[first:last]) < self._threshold
        if first == 0:
            held_out[:1] = False
        return held_out if self._held_out else ~held_out

    def _drop(self, reason: str, kept: np.ndarray, bad: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        bad = kept & bad
        self.dropped[reason].count += int(np.count_nonzero(bad))
        self.dropped[reason].tokens += int(lengths[bad].sum())
        return kept & ~bad

    def _bounds(self, index: int) -> tuple[int, int]:
        first = index * self.block_size
        return first, min(first + self.block_size, self.store.num_documents)

    def numbers(self, index: int) -> np.ndarray:
        """Numbers in the store of a block's documents, int64 [documents]."""
        first, last = self._bounds(index)
        bits = np.unpackbits(self._bits[first // 8 : -(-last // 8)], count=last - first)
        return first + np.flatnonzero(bits)

    def _block(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each document of a block begins in the store, and its tokens, both int64 [documents]."""
        first, last = self._bounds(index)
        offsets, kept = np.array(self.store.offsets[first : last + 1]), self.numbers(index) - first
        return offsets[kept], offsets[kept + 1] - offsets[kept]

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each block's documents, as `block` gives them."""
        for index in range(self.num_blocks):
            yield self._block(index)
            self.let_go(index)

    def let_go(self, index: int) -> None:
        """Behind block `index` of all: pages of a map that were read stay in the kernel's cache anyway; kept by the process
        they would count as its memory."""
        if index % RELEASE_BLOCKS == RELEASE_BLOCKS - 1 or index == self.num_blocks - 1:
            for array in (self.store.offsets, self.store.places):
                if isinstance(array.base, mmap.mmap):
                    array.base.madvise(mmap.MADV_DONTNEED)


def count_targets(store: TokenStore, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Targets in each stretch [begin, end) of a store with a mask, int64. The stretches stand in order."""
    counts = np.zeros(len(begins), np.int64)
    breaks = np.append(np.flatnonzero(begins[1:] - ends[:-1] > GAP_TOKENS) + 1, len(begins))
    index = 0
    while index < len(begins):
        low = int(begins[index])
        within = np.searchsorted(ends, low + SCAN_TOKENS, side="right")
        stop = max(int(min(within, breaks[np.searchsorted(breaks, index, side="right")])), index + 1)
        high = int(ends[stop - 1])
        if stop == index + 1:
            cuts = range(low, high, SCAN_TOKENS)
            counts[index] = sum(int(_flags(store, cut, min(cut + SCAN_TOKENS, high)).sum()) for cut in cuts)
        else:
            ahead = np.concatenate([[0], np.cumsum(_flags(store, low, high), dtype=np.int64)])
            counts[index:stop] = ahead[ends[index:stop] - low] - ahead[begins[index:stop] - low]
        index = stop
    return counts


def _flags(store: TokenStore, begin: int, end: int) -> np.ndarray:
    flags = store.read_targets(begin, end)
    assert flags is not None, "a store with a target mask"
    return flags
