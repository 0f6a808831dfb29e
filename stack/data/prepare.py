"""Documents -> token stores, complete or absent.

A store's folder is named by a hash of its source, tokenizer and settings, so another setting makes another folder and
two settings never mix. One process at a time builds a store, or several that share it by `shard`; the lock falls with
its process. Killed at any moment, the same command goes on from the shards that are complete (`build.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stack.config.schema_data import DataConfig, MixturePart
from stack.data.build import Building, Say, hold_lock
from stack.data.encode import Recipe
from stack.data.sources import SOURCES, Source, SourceRequest
from stack.data.store import FORMAT, TOKENIZER, TokenStore
from stack.data.summary import describe
from stack.data.tokenizer import TextEncoder, check_vocabulary, load_tokenizer
from stack.errors import ConfigError, DataError, Fault

NAMED = 5
"""Unfinished stores that are told by name."""


@dataclass(frozen=True)
class ArrayTask:
    """Which part of the work is this process's, where several machines share it."""

    index: int
    count: int
    """Machine `index` of `count`, from 0; makes its shards only."""


def ensure_stores(
    data: DataConfig, *, tokenizer_path: str | None, model_vocab: int | None, seed: int, say: Say = print
) -> list[Path]:
    """Folders of the stores for these settings, made now if they are not there: one for each part of
    `data.mixture`, in its order, or one in all. For one process: others wait for it. Raises DataError, ConfigError."""
    return [
        ensure_store(part, tokenizer_path=tokenizer_path, model_vocab=model_vocab, seed=seed, say=say)
        for part in mixture_parts(data)
    ]


def mixture_parts(data: DataConfig) -> list[DataConfig]:
    """The data section of each part of a mixture; without one the section itself."""
    parts = []
    own = {item.name for item in fields(MixturePart)} & {item.name for item in fields(DataConfig)}
    for part in data.mixture:
        given = {name: getattr(part, name) for name in own if getattr(part, name) is not None}
        if part.source is not None and part.path is None:
            given["path"] = None  # another source's path is none of its own
        parts.append(replace(data, **given, mixture=[]))
    return parts or [data]


def ensure_store(
    data: DataConfig, *, tokenizer_path: str | None, model_vocab: int | None, seed: int, say: Say = print
) -> Path:
    """Folder of the store of one source; made now if it is not there. For one process: others wait for it.

    tokenizer_path: the model's tokenizer (`model.tokenizer` or `model.path`), used unless
    `data.train_tokenizer`. model_vocab: ids that the model knows; None if unknown. say: takes messages for
    the user. Raises DataError, ConfigError.
    """
    order = _Order(data, tokenizer_path, model_vocab, seed, say)
    order.run(order.make_all)
    say(describe(TokenStore(order.folder)))
    return order.folder


def prepare_task(
    data: DataConfig, task: ArrayTask, *, tokenizer_path: str | None, model_vocab: int | None, seed: int, say: Say = print
) -> None:  # fmt: skip
    """This machine's shards of every store of the settings. `merge_tasks` or `ensure_stores` completes them."""
    for part in mixture_parts(data):
        order = _Order(part, tokenizer_path, model_vocab, seed, say)
        order.run(lambda order=order: order.make_task(task))
        say(f"machine {task.index} of {task.count} has made its shards of {order.folder}")


def merge_tasks(
    data: DataConfig, *, tokenizer_path: str | None, model_vocab: int | None, seed: int, say: Say = print
) -> list[Path]:
    """Join what the machines made, and make nothing. Raises DataError if shards are missing."""
    folders = []
    for part in mixture_parts(data):
        order = _Order(part, tokenizer_path, model_vocab, seed, say)
        order.run(order.merge)
        say(describe(TokenStore(order.folder)))
        folders.append(order.folder)
    return folders


class _Order:
    """One store that is wanted, and what it is made from."""

    def __init__(
        self, data: DataConfig, tokenizer_path: str | None, model_vocab: int | None, seed: int, say: Say
    ):
        self.data, self.tokenizer_path, self.say = data, tokenizer_path, say
        unknown = data.vocab_size if data.source == "random" else 2**31 - 1
        self.source = SOURCES[data.source](SourceRequest(data, model_vocab or unknown, seed))
        self.encoder = _load_encoder(data, self.source, tokenizer_path, model_vocab)
        self.chat = _load_chat(data, self.source, tokenizer_path)
        name = f"{data.source}-{_settings_hash(data, self.source, self.chat or self.encoder)}"
        self.folder = Path(data.store).expanduser() / name
        self.building = Building(self.folder, data, self.source, say)

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` unless the store is there. Raises DataError for what the disk refuses."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            if not self.folder.exists():
                work()
        except OSError as error:
            where, cause = error.filename or self.folder, error.strerror or error
            fix = "free some space or mend the permissions, or point data.store at another folder"
            raise DataError(
                f"{where}: {cause}, while the token store {self.folder} was made. Fix: {fix}, and start again: what is "
                "complete stays"
            ) from error

    def make_all(self) -> None:
        with self._lock() as locked:
            if not self.folder.exists():  # another process may have made it while this one waited
                self._tell_others()
                recipe = self._recipe(clean=locked)
                self.building.make(recipe)
                self._finish(recipe)

    def make_task(self, task: ArrayTask) -> None:
        with self._lock(shared=True):
            if not self.folder.exists():
                self.building.make(self._recipe(clean=False), (task.index, task.count))

    def merge(self) -> None:
        with self._lock() as locked:
            if not self.folder.exists():
                recipe = self._recipe(clean=locked)
                if missing := self.building.missing():
                    raise DataError(
                        f"{self.building.partial}: {len(missing):,} of {len(self.building.units):,} shards are missing, the first "
                        f"is {missing[0]}. Fix: run the parts shard=i/N that did not end well (shard {missing[0]} is of the one "
                        f"with i = {missing[0]} modulo N), or the command without merge=true, which makes what is missing"
                    )
                self._finish(recipe)

    def _tell_others(self) -> None:
        """What other settings left unfinished takes room, and may be wanted still."""
        partials = self.folder.parent.glob("*.partial")
        others = sorted(path.name for path in partials if path != self.building.partial)
        if others:
            more = f" and {len(others) - NAMED:,} more" if len(others) > NAMED else ""
            self.say(
                f"{self.folder.parent} holds {len(others):,} unfinished stores of other settings or files, to be deleted if no "
                f"command is to finish them: {', '.join(others[:NAMED])}{more}"
            )

    def _lock(self, shared: bool = False) -> Any:
        return hold_lock(self.folder.with_name(f"{self.folder.name}.lock"), self.say, shared)

    def _recipe(self, clean: bool) -> Recipe:
        trains = self.data.train_tokenizer and self.source.num_ids is None
        self.encoder = self.building.open(self.encoder, trains=trains, clean=clean)
        num_ids = (
            self.chat.num_ids if self.chat else self.encoder.num_ids if self.encoder else self.source.num_ids
        )
        encoder = None if self.chat else self.encoder
        return Recipe(
            self.data, self.source, encoder, self.tokenizer_path, num_ids or 0, self.building.partial
        )

    def _finish(self, recipe: Recipe) -> None:
        made_by = self.chat or self.encoder
        kept = TOKENIZER if self.data.train_tokenizer and made_by else self.tokenizer_path
        eos = recipe.eos_id if made_by else self.data.token_eos
        self.building.finish(
            recipe,
            notes=made_by.notes() if made_by else [],
            tokenizer=None if self.data.source == "random" else kept,
            tokenizer_hash=self.encoder.fingerprint() if self.encoder else None,
            eos_id=self.chat.eos_id if self.chat else eos,
        )


def _load_encoder(
    data: DataConfig, source: Source, tokenizer_path: str | None, model_vocab: int | None
) -> TextEncoder | None:
    """The model's tokenizer; None if ids need none or it is yet to be trained. Raises ConfigError."""
    if source.num_ids is not None:
        return None
    if data.train_tokenizer:
        if model_vocab is not None and data.vocab_size > model_vocab:
            want, fix = f"at most {model_vocab}, the model's vocabulary", f"data.vocab_size={model_vocab}"
            raise ConfigError([Fault("data.vocab_size", data.vocab_size, want, fix)])
        return None
    if tokenizer_path is None:
        fix = "model.tokenizer=<folder or hub name>, or data.train_tokenizer=true for a model from scratch"
        raise ConfigError([Fault("model.tokenizer", None, f"a tokenizer for data.source={data.source}", fix)])
    encoder = TextEncoder(load_tokenizer(tokenizer_path))
    check_vocabulary(encoder, model_vocab, "model.tokenizer", tokenizer_path)
    if data.format == "text" and data.append_eos and encoder.eos_id is None:
        want, fix = "false: this tokenizer has no end-of-text token", "data.append_eos=false"
        raise ConfigError([Fault("data.append_eos", True, want, fix)])
    return encoder


def _load_chat(data: DataConfig, source: Source, tokenizer_path: str | None) -> Any:
    """The encoder of supervised records, None for text and ids. Raises ConfigError, DataError."""
    if data.format == "text" or source.num_ids is not None:
        return None
    from stack.data.chat.encode import ChatEncoder

    if tokenizer_path is None or data.train_tokenizer:
        fix = "data.train_tokenizer=false model.tokenizer=FOLDER"
        want = f"the tokenizer of a model for data.format={data.format}"
        raise ConfigError([Fault("model.tokenizer", tokenizer_path, want, fix)])
    return ChatEncoder(tokenizer_path, data)


def _settings_hash(data: DataConfig, source: Source, encoder: Any) -> str:
    """Hash of all that decides a store's content and can be known without reading the text."""
    trained = {"vocab_size": data.vocab_size} if data.train_tokenizer else None
    settings: dict[str, Any] = {
        "format": FORMAT,
        "source": source.identity(),
        "records": data.format,
        "tokenizer": None if source.num_ids is not None else encoder.fingerprint() if encoder else trained,
        "append_eos": data.append_eos,
        "bad_text": data.bad_text,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode(errors="surrogatepass")).hexdigest()[
        :16
    ]
