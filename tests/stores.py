"""Token stores for tests: from given ids, or from text through the whole preparation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stack.config.schema_data import DataConfig
from stack.data.prepare import ensure_store
from stack.data.store import StoreWriter, TokenStore


def store_of_ids(folder: Path, documents: Sequence[Sequence[int]], num_ids: int = 70_000) -> TokenStore:
    """A store that holds just these documents."""
    folder.mkdir(parents=True)
    writer = StoreWriter(folder, num_ids)
    for number, ids in enumerate(documents):
        writer.append(np.array(ids, dtype=np.int64))
        writer.end_document(str(number))
    writer.finish(source="test", text=None, text_bytes=0, tokenizer=None, eos_id=None)
    return TokenStore(folder)


def counting_store(folder: Path, lengths: Sequence[int]) -> TokenStore:
    """Documents of these lengths whose tokens are 0, 1, 2 ... through the whole store, so that each id is
    unique."""
    ends = np.cumsum([0, *lengths])
    return store_of_ids(folder, [list(range(a, b)) for a, b in zip(ends[:-1], ends[1:], strict=True)])


def prepare(data: DataConfig, seed: int = 1) -> TokenStore:
    """The store that training would use for these settings, with no word on the console."""
    return TokenStore(
        ensure_store(data, tokenizer_path=None, model_vocab=None, seed=seed, say=lambda _: None)
    )
