"""Token stores for tests: from given ids, or from text through the whole preparation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from stack.config.schema_data import DataConfig
from stack.data.prepare import ensure_store
from stack.data.shards import StoreWriter
from stack.data.store import INFO, OFFSETS, PLACES, SHARDS, StoreInfo, TokenStore, shard_path


def store_of_ids(
    folder: Path,
    documents: Sequence[Sequence[int]],
    num_ids: int = 70_000,
    targets: Sequence[Sequence[bool]] | None = None,
) -> TokenStore:
    """A store that holds just these documents. targets: for each, which of its tokens may be predicted."""
    folder.mkdir(parents=True)
    writer = StoreWriter(folder, num_ids)
    for number, ids in enumerate(documents):
        mask = None if targets is None else np.array(targets[number], dtype=bool)
        writer.append(np.array(ids, dtype=np.int64), mask)
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


def sparse_store(folder: Path, lengths: np.ndarray, seed: int = 0) -> TokenStore:
    """Documents of these lengths, however many, with random places; their tokens are holes in a sparse file."""
    (folder / SHARDS).mkdir(parents=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    offsets.tofile(folder / OFFSETS)
    np.random.default_rng(seed).integers(0, 2**64, len(lengths), dtype="<u8").tofile(folder / PLACES)
    num_tokens = int(offsets[-1])
    info = StoreInfo(
        source="test",
        dtype="<u2",
        num_documents=len(lengths),
        num_tokens=num_tokens,
        shards=[num_tokens],
        content=f"{len(lengths)} {num_tokens}",
        text=None,
        text_bytes=0,
        tokenizer=None,
        eos_id=None,
        num_ids=1 << 16,
    )
    with shard_path(folder, 0).open("wb") as file:
        file.truncate(2 * num_tokens)
    (folder / INFO).write_text(json.dumps(asdict(info)))
    return TokenStore(folder)
