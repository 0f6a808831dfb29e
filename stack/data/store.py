"""The token store: the ids of all documents in one memory-mapped file, with their boundaries.

A store is a folder:

    tokens.bin     ids end to end, little-endian uint16 or uint32, whichever holds the vocabulary
    offsets.bin    int64 [num_documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]
    places.bin     uint64 [num_documents]: hash of each document's place in its source
    store.json     StoreInfo: what it was made from, counts, hashes
    tokenizer/     Hugging Face folder, if the tokenizer was trained on this text

It is written under another name and renamed when complete, so a folder with the right name is whole.
"""

from __future__ import annotations

import array
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stack.errors import DataError

FORMAT = 1
TOKENS, OFFSETS, PLACES, INFO = "tokens.bin", "offsets.bin", "places.bin", "store.json"
TOKENIZER = "tokenizer"


@dataclass
class StoreInfo:
    """What a store holds and what it was made from."""

    source: str
    dtype: str
    """numpy name of the ids in tokens.bin."""

    num_documents: int
    num_tokens: int
    content: str
    """SHA-256 over ids and boundaries: the same on every machine for the same tokens."""

    text: str | None
    """SHA-256 of the documents' UTF-8 bytes, one after the other; None if the source made ids."""

    text_bytes: int
    tokenizer: str | None
    """Where its tokenizer is: TOKENIZER for the folder inside, else a path or hub name; None if the source
    made ids."""

    eos_id: int | None
    """Id behind each document, None if none was put there."""

    num_ids: int
    """All ids are below this."""

    dropped: dict[str, Any] = field(default_factory=dict)
    """Documents left out: reason -> count, bytes and the first one's place."""

    notes: list[str] = field(default_factory=list)
    """What else the user should know of how the text became ids."""

    tokenizer_hash: str | None = None
    """Of all that decides the tokenizer's ids (`TextEncoder.fingerprint`); None if the source made ids."""

    format: int = FORMAT


class TokenStore:
    """A complete store, read through memory maps: opening it reads only store.json."""

    def __init__(self, folder: Path):
        """Raises DataError if the folder is no whole store."""
        self.folder = folder
        try:
            fields = json.loads((folder / INFO).read_text())
            if fields.get("format") != FORMAT:
                raise DataError(
                    _damaged(folder, f"format {fields.get('format')}, this version reads {FORMAT}")
                )
            self.info = StoreInfo(**fields)
            self.tokens = _map(folder / TOKENS, self.info.dtype, self.info.num_tokens)
            self.offsets = _map(folder / OFFSETS, "<i8", self.info.num_documents + 1)
            self.places = _map(folder / PLACES, "<u8", self.info.num_documents)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(_damaged(folder, str(error))) from error

    @property
    def trained_tokenizer(self) -> str | None:
        """Folder of the tokenizer that was trained on this text; None if it is the model's or there is none."""
        return self.tokenizer if self.info.tokenizer == TOKENIZER else None

    @property
    def tokenizer(self) -> str | None:
        """Folder or hub name of the tokenizer, None if the source made ids."""
        inside = self.info.tokenizer == TOKENIZER
        return str(self.folder / TOKENIZER) if inside else self.info.tokenizer

    def split(self, eval_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the documents for training and for evaluation, int64, both in the store's order.

        A document's place decides, not its number, so that it stays where it is when others are added. The
        first document is always for training, so that a single book is not held out whole.
        """
        held_out = self.places < np.uint64(int(eval_fraction * 2.0**64))
        held_out[:1] = False
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)


class StoreWriter:
    """Writes the files of a store into an empty folder, document by document."""

    def __init__(self, folder: Path, num_ids: int):
        self.folder = folder
        self.num_ids = num_ids
        self.dtype = "<u2" if num_ids <= 1 << 16 else "<u4"
        self.num_tokens = 0
        self._offsets = array.array("q", [0])
        self._places = array.array("Q")
        self._hash = hashlib.sha256()
        self._file = (folder / TOKENS).open("wb")

    def append(self, ids: np.ndarray) -> None:
        """Add ids to the open document. Raises DataError if one is not below `num_ids`."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_ids:
            found, want = f"ids from {ids.min()} to {ids.max()}", f"0 to {self.num_ids - 1}"
            raise DataError(
                f"{found} in the source, expected {want}. Fix: use a model with a larger vocabulary"
            )
        packed = ids.astype(self.dtype).tobytes()
        self._hash.update(packed)
        self._file.write(packed)
        self.num_tokens += len(ids)

    def end_document(self, place: str) -> None:
        """Close the open document; without ids it is none."""
        if self.num_open_tokens:
            self._offsets.append(self.num_tokens)
            self._places.append(hash_place(place))

    @property
    def num_open_tokens(self) -> int:
        """Ids of the document that is not closed yet."""
        return self.num_tokens - self._offsets[-1]

    @property
    def num_documents(self) -> int:
        return len(self._places)

    def finish(self, **fields: Any) -> StoreInfo:
        """Write index and info; `fields` are those of StoreInfo that the writer does not know."""
        self.close()
        offsets = np.asarray(self._offsets, dtype="<i8").tobytes()
        self._hash.update(offsets)
        info = StoreInfo(
            dtype=self.dtype,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            content=self._hash.hexdigest(),
            num_ids=self.num_ids,
            **fields,
        )
        (self.folder / OFFSETS).write_bytes(offsets)
        (self.folder / PLACES).write_bytes(np.asarray(self._places, dtype="<u8").tobytes())
        (self.folder / INFO).write_text(json.dumps(asdict(info), indent=1))
        return info

    def close(self) -> None:
        self._file.close()


def hash_place(place: str) -> int:
    """64 bits that are the same on every machine."""
    return int.from_bytes(
        hashlib.blake2b(place.encode(errors="surrogateescape"), digest_size=8).digest(), "little"
    )


def _map(path: Path, dtype: str, length: int) -> np.ndarray:
    want, got = length * np.dtype(dtype).itemsize, path.stat().st_size
    if want != got:
        raise ValueError(f"{path.name} has {got} bytes, not {want}")
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,)) if length else np.zeros(0, dtype)


def _damaged(folder: Path, detail: str) -> str:
    return f"{folder}: no whole token store ({detail}). Fix: delete the folder and prepare it again with launch/prepare.py"
