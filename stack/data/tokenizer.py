"""The tokenizer of a run: trained on the text itself, or the one that belongs to the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stack.data.chunks import cut_text, safe_cut
from stack.dist.network import hub_reachable
from stack.errors import ConfigError, DataError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""All bytes and END_OF_TEXT."""


class TextEncoder:
    """Text -> ids without any token that the text does not hold: no BOS, no EOS. Unicode is left to the
    tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self.cut = safe_cut(self._backend) if self._backend is not None else None
        self.num_ids: int = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        """Ids it can give, counting added tokens."""

        self.eos_id = cast("int | None", tokenizer.eos_token_id)
        self.control_ids = set(tokenizer.all_special_ids)
        """Ids of tokens that mark rather than spell, such as the end of a text."""

    def __getstate__(self) -> dict[str, Any]:
        """A worker process gets the Rust tokenizer alone, where there is one, and need not load transformers."""
        state = dict(vars(self))
        if self._backend is not None:
            del state["tokenizer"]
        return state

    def notes(self) -> list[str]:
        """What this tokenizer does that a user may not expect."""
        notes = []
        if self.cut is None:
            notes.append(
                "documents are tokenised whole, since this tokenizer has no sure place to cut a long text"
            )
        if self._backend is not None and self._backend.normalizer is not None:
            notes.append("the tokenizer normalises Unicode, so ids may give back text in another spelling")
        return notes

    def chunks(self, blocks: Iterable[str], where: str) -> Iterable[str]:
        """A document's blocks, cut anew where the ids of the chunks, joined, are those of the whole
        document. where: its place, for people. Raises DataError for a text too long to be tokenised uncut."""
        return cut_text(blocks, self.cut, where=where)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, on all cores."""
        if self._backend is None:
            ids = [
                self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts
            ]
        else:
            ids = [one.ids for one in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [np.array(row, dtype=np.int64) for row in ids]

    def fingerprint(self) -> str:
        """Hash of all that decides the ids."""
        vocabulary = (
            sorted(self.tokenizer.get_vocab().items()) if self._backend is None else self._backend.to_str()
        )
        rules = json.dumps([type(self.tokenizer).__name__, self.eos_id, vocabulary])
        return hashlib.sha256(rules.encode(errors="surrogatepass")).hexdigest()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) of at most `vocab_size` tokens; a short
    text gives fewer.

    Every byte is a token, so any text comes back unchanged. END_OF_TEXT has id 0 and is end and padding
    token.
    """
    from transformers import (
        PreTrainedTokenizerFast,
    )  # here and below: worker processes import this file, and not this

    if vocab_size < SMALLEST_VOCAB:
        fix = "data.vocab_size=4096 is usual for a few MB of text"
        raise ConfigError(
            [Fault("data.vocab_size", vocab_size, f"at least {SMALLEST_VOCAB}: all bytes and one end", fix)]
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, in the local cache, or on the hub. Raises DataError."""
    from transformers import AutoTokenizer

    local = os.path.isdir(os.path.expanduser(path))
    try:
        return AutoTokenizer.from_pretrained(
            os.path.expanduser(path) if local else path, local_files_only=True
        )
    except Exception as error:  # a broken tokenizer.json is a bare Exception of the tokenizers library
        if local:
            raise DataError(
                _explain(path, "the folder holds no tokenizer that transformers can load", error)
            ) from error
    if Path(path).is_absolute() or path.startswith((".", "~")):
        raise DataError(_explain(path, "there is no such folder"))
    if not hub_reachable():
        raise DataError(
            _explain(path, "it is no local folder, not in the cache, and the hub cannot be reached")
        )
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # as above
        raise DataError(_explain(path, "the hub gave no tokenizer", error)) from error


def check_vocabulary(encoder: TextEncoder, model_vocab: int | None, key: str, value: object) -> None:
    """Refuse a tokenizer with ids that the model does not know. Raises ConfigError."""
    if model_vocab is not None and encoder.num_ids > model_vocab:
        want = f"a tokenizer of at most {model_vocab} ids, the model's vocabulary (this one has {encoder.num_ids})"
        raise ConfigError(
            [Fault(key, value, want, "use the model's own tokenizer, or a model with a larger vocabulary")]
        )


def _explain(path: str, what: str, error: Exception | None = None) -> str:
    detail = f" ({str(error).splitlines()[0]:.300})" if error else ""
    return (
        f"tokenizer {path}: {what}{detail}. Fix: set model.tokenizer to a folder with a tokenizer.json, or train one on the "
        "text with data.train_tokenizer=true"
    )
