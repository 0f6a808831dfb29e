"""Documents -> token store, complete or absent.

A store's folder is named by a hash of its source, tokenizer and settings, so another setting makes another
folder and two settings never mix. It is built under a name of its own and renamed when all of it is on the
disk: killed at any moment, the same command makes it again. One process at a time builds a store; the lock
falls with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from stack.config.schema_data import DataConfig
from stack.data.chunks import SAFE_CUT, cut_text
from stack.data.encode import TextWriter, text_blocks, write_ids
from stack.data.progress import Progress
from stack.data.sources import SOURCES, Source, SourceRequest, Tally
from stack.data.store import FORMAT, TOKENIZER, StoreWriter, TokenStore
from stack.data.tokenizer import TextEncoder, check_vocabulary, load_tokenizer, train_tokenizer
from stack.errors import ConfigError, DataError, Fault

Say = Callable[[str], None]


def ensure_store(
    data: DataConfig, *, tokenizer_path: str | None, model_vocab: int | None, seed: int, say: Say = print
) -> Path:
    """Folder of the store for these settings; made now if it is not there. For one process: others wait for
    it.

    tokenizer_path: the model's tokenizer (`model.tokenizer` or `model.path`), used unless
    `data.train_tokenizer`. model_vocab: ids that the model knows; None if unknown. say: takes messages for
    the user. Raises DataError, ConfigError.
    """
    source = SOURCES[data.source](SourceRequest(data, model_vocab or data.vocab_size, seed))
    encoder = _load_encoder(data, source, tokenizer_path, model_vocab)
    folder = Path(data.store).expanduser() / f"{data.source}-{_settings_hash(data, source, encoder)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            with _lock(folder, say) as locked:
                if not folder.exists():  # another process may have made it while this one waited
                    _build(folder, data, source, encoder, tokenizer_path, clean=locked, say=say)
    except OSError as error:
        where, cause = error.filename or folder, error.strerror or error
        fix = "free some space or mend the permissions, or point data.store at another folder"
        raise DataError(f"{where}: {cause}, while the token store {folder} was made. Fix: {fix}") from error
    say(describe(TokenStore(folder)))
    return folder


def describe(store: TokenStore) -> str:
    """What a store holds and what was left out, for people."""
    info = store.info
    lines = [f"token store {store.folder}: {info.num_documents:,} documents, {info.num_tokens:,} tokens"]
    if info.text_bytes:
        tokens = info.num_tokens - (info.num_documents if info.eos_id is not None else 0)
        lines[0] += f", {info.text_bytes:,} bytes of text, {info.text_bytes / tokens:.2f} bytes a token"
        lines.append(
            f"  end-of-text token: {'none' if info.eos_id is None else info.eos_id}; "
            f"tokenizer: {store.trained_tokenizer or 'the one that model.tokenizer or model.path names'}"
        )
    lines += [f"  {note}" for note in info.notes]
    for reason, entry in info.dropped.items():
        lines.append(
            f"  left out, {reason}: {entry['count']:,} ({entry['num_bytes']:,} bytes), first {entry['first']}"
        )
    return "\n".join(lines)


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
    if data.append_eos and encoder.eos_id is None:
        want, fix = "false: this tokenizer has no end-of-text token", "data.append_eos=false"
        raise ConfigError([Fault("data.append_eos", True, want, fix)])
    return encoder


def _settings_hash(data: DataConfig, source: Source, encoder: TextEncoder | None) -> str:
    """Hash of all that decides a store's content and can be known without reading the text."""
    trained = {"vocab_size": data.vocab_size} if data.train_tokenizer else None
    settings: dict[str, Any] = {
        "format": FORMAT,
        "source": source.identity(),
        "tokenizer": None if source.num_ids is not None else encoder.fingerprint() if encoder else trained,
        "append_eos": data.append_eos,
        "bad_text": data.bad_text,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode(errors="surrogatepass")).hexdigest()[
        :16
    ]


@contextmanager
def _lock(folder: Path, say: Say) -> Iterator[bool]:
    """Hold the store's lock, waiting for another process that has it. False on a file system without
    locks."""
    path = folder.with_name(f"{folder.name}.lock")
    with path.open("w") as file:
        yield _acquire(file, folder, say)


def _acquire(file: IO[str], folder: Path, say: Say) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"waiting for another process that prepares {folder}")
        fcntl.flock(file, fcntl.LOCK_EX)
    except (
        OSError
    ) as error:  # some network file systems; two builders then do the work twice, and the first one's counts
        say(f"no lock on {file.name} ({error.strerror}): start one process at a time")
        return False
    return True


def _build(
    folder: Path, data: DataConfig, source: Source, encoder: TextEncoder | None, tokenizer_path: str | None, *,
    clean: bool, say: Say,
) -> None:  # fmt: skip
    """Make the store beside its place, then rename it. `clean`: remove what killed processes left."""
    for leftover in folder.parent.glob(f"{folder.name}.partial-*") if clean else ():
        say(f"removing {leftover}, left by a process that was stopped")
        shutil.rmtree(leftover)
    partial = folder.with_name(f"{folder.name}.partial-{os.uname().nodename}-{os.getpid()}")
    partial.mkdir()
    try:
        kept = tokenizer_path
        if encoder is None and source.num_ids is None:
            encoder, kept = _train_encoder(data, source, partial / TOKENIZER, say), TOKENIZER
        _write_store(partial, data, source, encoder, kept)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already if all went well


def _train_encoder(data: DataConfig, source: Source, folder: Path, say: Say) -> TextEncoder:
    say(f"training a tokenizer of {data.vocab_size:,} tokens on the text of data.source={data.source}")
    progress = Progress("reading text", source.total_bytes)

    def texts() -> Iterator[str]:
        for document in source.documents(Tally(data.bad_text)):
            for chunk in cut_text(text_blocks(document), SAFE_CUT):
                progress.advance(len(chunk.encode()))
                yield chunk

    tokenizer = train_tokenizer(texts(), data.vocab_size)
    progress.close()
    tokenizer.save_pretrained(folder)
    return TextEncoder(load_tokenizer(str(folder)))


def _write_store(
    folder: Path, data: DataConfig, source: Source, encoder: TextEncoder | None, tokenizer: str | None
) -> None:
    """All files of the store. `tokenizer`: where the encoder came from. Raises DataError if there is no
    text."""
    tally = Tally(data.bad_text)
    progress = Progress("tokens", source.total_bytes)
    eos_id = encoder.eos_id if encoder is not None and data.append_eos else None
    writer = StoreWriter(folder, encoder.num_ids if encoder is not None else source.num_ids or 0)
    made: dict[str, Any] = {"text": None, "text_bytes": 0, "tokenizer": None}
    try:
        if encoder is None:
            write_ids(writer, source.documents(tally), progress)
        else:
            text = TextWriter(writer, encoder, eos_id, tally, progress)
            text.write(source.documents(tally))
            made = {
                "text": text.text_hash,
                "text_bytes": text.text_bytes,
                "tokenizer": tokenizer,
                "tokenizer_hash": encoder.fingerprint(),
                "notes": text.notes(),
            }
        dropped = {reason: asdict(entry) for reason, entry in tally.dropped.items()}
        if writer.num_documents == 0:
            raise DataError(_explain_no_text(data, dropped))
        writer.finish(source=data.source, eos_id=eos_id, dropped=dropped, **made)
    finally:
        writer.close()
        progress.close()


def _publish(partial: Path, folder: Path) -> None:
    """Give the store its name, once all of it is on the disk itself."""
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():  # else another process without a lock was faster, with the same content
            raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain_no_text(data: DataConfig, dropped: dict[str, Any]) -> str:
    reasons = "; ".join(
        f"{reason}: {entry['count']}, first {entry['first']}" for reason, entry in dropped.items()
    )
    return f"data.path={data.path}: no document with text ({reasons or 'none found'}). Fix: point data.path at text"
