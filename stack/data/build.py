"""The making of one store, so that it can stop at any moment and go on.

The folder that it is made in, `NAME.partial`, holds the plan (the units of the source), the tokenizer if one is
trained, and the finished shards, each complete or absent. Whoever comes next, in this process or another, makes what is
missing. The last step joins the shards and gives the folder its name. The plan depends on the source alone, so that a
store has the same bytes however often its making stopped, and however many workers and machines shared it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from stack.config.schema_data import DataConfig
from stack.data.chunks import WIDE_CUT, cut_text
from stack.data.encode import Recipe, is_cuttable, place_of, text_blocks
from stack.data.progress import Progress
from stack.data.shards import join_shards, read_record, sync
from stack.data.sources import Source, Tally, Unit
from stack.data.store import INFO, TOKENIZER, UNITS
from stack.data.tokenizer import TextEncoder, load_tokenizer, train_tokenizer
from stack.data.workers import choose_workers, make_shards
from stack.errors import DataError

Say = Callable[[str], None]

LEAST_UNIT, MOST_UNIT, USUAL_UNITS = 4 << 20, 64 << 20, 256
"""Bytes of the source in a unit: the whole in 256, but no less than 4 MiB, which a core is done with in a second, and no
more than 64 MiB, which is what a kill can cost a worker."""


class Building:
    """A store in the making."""

    def __init__(self, folder: Path, data: DataConfig, source: Source, say: Say):
        """folder: the store's own, when it is done."""
        self.folder, self.data, self.source, self.say = folder, data, source, say
        self.partial = folder.with_name(f"{folder.name}.partial")
        self.units: list[Unit] = []
        self.tally = Tally(data.bad_text)

    def open(self, encoder: TextEncoder | None, *, trains: bool, clean: bool) -> TextEncoder | None:
        """Plan and tokenizer, made or found. encoder: the model's; trains: make one of the text. clean: remove what
        killed processes left half-written."""
        (self.partial / UNITS).mkdir(parents=True, exist_ok=True)
        with hold_lock(self.partial / UNITS / "setup.lock", self.say):
            for leftover in self.partial.rglob("*.part") if clean else ():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            if trains:
                encoder = self._trained_encoder()
            self._find_plan(encoder.cut if encoder is not None else None)
        return encoder

    def make(self, recipe: Recipe, shard: tuple[int, int] | None = None) -> None:
        """Make the shards that are missing: all of them, or those of machine `shard[0]` of `shard[1]`."""
        index, count = shard or (0, 1)
        mine = range(index, len(self.units), count)
        todo = [number for number in mine if read_record(self.partial, number) is None]
        if len(todo) < len(mine):
            self.say(
                f"{len(mine) - len(todo):,} of {len(mine):,} shards are there already, in {self.partial}"
            )
        total = sum(self.units[number].size for number in mine)
        done = total - sum(self.units[number].size for number in todo)
        progress = Progress("tokens", total, done)
        workers = choose_workers(self.data.prepare_workers, self.source.total_bytes, len(todo))
        try:
            make_shards(recipe, self.units, todo, workers, progress)
        finally:
            progress.close()

    def missing(self) -> list[int]:
        """Numbers of the units without a shard."""
        return [number for number in range(len(self.units)) if read_record(self.partial, number) is None]

    def finish(self, recipe: Recipe, notes: list[str], **fields: Any) -> None:
        """Join the shards, and give the folder its name. notes, fields: of StoreInfo. Raises DataError without a
        document."""
        if not (self.partial / INFO).exists():
            try:
                self.source.check_unchanged()
            except DataError:
                shutil.rmtree(self.partial)
                raise
            records = [read_record(self.partial, number) for number in range(len(self.units))]
            whole = [record for record in records if record is not None]
            assert len(whole) == len(records)
            for record in whole:
                self.tally.add(record.dropped)
            dropped = {reason: asdict(entry) for reason, entry in self.tally.dropped.items()}
            if not any(record.num_documents for record in whole):
                shutil.rmtree(self.partial)
                raise DataError(_explain_no_text(self.data, dropped))
            control = sum(record.num_control for record in whole)
            if control:
                notes = [
                    *notes,
                    f"{control:,} control tokens are spelled out in the text and were read as such",
                ]
            remarks = Tally()
            for record in whole:
                remarks.add(record.remarks)
            notes = notes + [
                f"{entry.count:,} records {what}, first {entry.first}"
                for what, entry in remarks.dropped.items()
            ]
            texts = "".join(record.text or "" for record in whole)
            join_shards(
                self.partial,
                whole,
                num_ids=recipe.num_ids,
                source=self.data.source,
                text=hashlib.sha256(texts.encode()).hexdigest() if texts else None,
                text_bytes=sum(record.text_bytes for record in whole),
                dropped=dropped,
                notes=notes,
                **fields,
            )
        shutil.rmtree(self.partial / UNITS)  # what comes here again finds the info, and goes on from it
        _publish(self.partial, self.folder)

    def _trained_encoder(self) -> TextEncoder:
        """The tokenizer in the folder, trained now if it is not there."""
        folder = self.partial / TOKENIZER
        if not folder.exists():
            part = folder.with_name(f"{folder.name}.{os.uname().nodename}-{os.getpid()}.part")
            _train(self.data, self.source, part, self.say)
            self.source.check_unchanged()
            for path in [*part.iterdir(), part]:
                sync(path)
            part.rename(folder)
        return TextEncoder(load_tokenizer(str(folder)))

    def _find_plan(self, cut: re.Pattern[str] | None) -> None:
        path = self.partial / UNITS / "plan.json"
        if (self.partial / INFO).exists():
            return  # all that is left is the name
        if not path.exists():
            total = self.source.total_bytes
            if total > 1 << 30:
                self.say(f"looking through {total / 1e9:,.1f} GB of files for places to cut them, once")
            size = min(max(total // USUAL_UNITS, LEAST_UNIT), MOST_UNIT)
            units = self.source.units(size, cut, self.tally)
            self.source.check_unchanged()
            dropped = {reason: asdict(entry) for reason, entry in self.tally.dropped.items()}
            part = path.with_name(f"plan.{os.uname().nodename}-{os.getpid()}.part")
            part.write_text(json.dumps({"units": [asdict(unit) for unit in units], "dropped": dropped}))
            sync(part)
            os.replace(part, path)
        try:
            plan = json.loads(path.read_text())
        except ValueError as error:
            fix = f"delete {self.partial} and start again"
            raise DataError(f"{path}: no whole plan of the store ({error}). Fix: {fix}") from error
        self.units = [Unit(**unit) for unit in plan["units"]]
        self.tally = Tally(self.data.bad_text)
        self.tally.add(plan["dropped"])


@contextmanager
def hold_lock(path: Path, say: Say, shared: bool = False) -> Iterator[bool]:
    """Hold a lock, waiting for another process that has it; it falls with the process. False on a file system without
    locks: two builders then do the work twice, and the first one's counts. shared: with others who share it."""
    with path.open("a+") as file:  # some network file systems want the right to read for a shared lock
        yield _acquire(file, say, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def _acquire(file: IO[str], say: Say, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"waiting for another process that holds {file.name}")
        fcntl.flock(file, kind)
    except OSError as error:
        say(f"no lock on {file.name} ({error.strerror}): start one process at a time")
        return False
    return True


def _train(data: DataConfig, source: Source, folder: Path, say: Say) -> None:
    say(f"training a tokenizer of {data.vocab_size:,} tokens on the text of data.source={data.source}")
    tally = Tally(data.bad_text)
    units = source.units(MOST_UNIT, None, tally)
    progress = Progress("reading text", sum(unit.size for unit in units))

    def texts() -> Iterator[str]:
        for unit in units:
            for document in source.documents(unit, tally):
                if not is_cuttable(document, WIDE_CUT, tally):
                    continue
                for chunk in cut_text(text_blocks(document), WIDE_CUT, where=place_of(document)):
                    progress.advance(len(chunk.encode()))
                    yield chunk
            progress.finish_unit(unit.size)

    tokenizer = train_tokenizer(texts(), data.vocab_size)
    progress.close()
    tokenizer.save_pretrained(folder)


def _publish(partial: Path, folder: Path) -> None:
    """Give the store its name, once all of it is on the disk itself."""
    for path in [
        partial,
        *(path for path in partial.rglob("*") if path.is_dir() or path.parent.name == TOKENIZER),
    ]:
        sync(path)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():  # else another process without a lock was faster, with the same content
            raise
        shutil.rmtree(partial, ignore_errors=True)
    sync(folder.parent)


def _explain_no_text(data: DataConfig, dropped: dict[str, Any]) -> str:
    if data.format != "text":
        from stack.data.chat.encode import explain_nothing_to_learn

        return explain_nothing_to_learn(data, {reason: entry["count"] for reason, entry in dropped.items()})
    reasons = "; ".join(
        f"{reason}: {entry['count']}, first {entry['first']}" for reason, entry in dropped.items()
    )
    return f"data.path={data.path}: no document with text ({reasons or 'none found'}). Fix: point data.path at text"
