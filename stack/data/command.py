"""What `launch/prepare.py` takes beside the settings of a run, and what it does with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.config.derive import architecture
from stack.config.schema import RunConfig
from stack.data.megatron import export_megatron
from stack.data.mixture import Share, shares_of
from stack.data.prepare import ArrayTask, ensure_stores, merge_tasks, prepare_task
from stack.data.preview import read_count, show_preview
from stack.data.store import TokenStore
from stack.data.summary import draw_lengths
from stack.errors import ConfigError, Fault

LENGTHS = "lengths.png"


@dataclass(frozen=True)
class Command:
    """One call of launch/prepare.py."""

    task: ArrayTask | None = None
    """`shard=i/N`: make the shards of machine i of N, from 0, and no more: for the tasks of a job array."""

    merge: bool = False
    """`merge=true`: join what the machines made, and make nothing."""

    export: Path | None = None
    """`export=FOLDER`: write the tokens as Megatron's .bin and .idx too."""

    preview: int | None = None
    """`preview=3`: show the first documents as the model will see them, and prepare nothing."""


def take_command(arguments: Sequence[str]) -> tuple[Command, list[str]]:
    """What is meant for the preparation, and the settings that are left. Raises ConfigError."""
    values: dict[str, str] = {}
    rest = []
    for text in arguments:
        key, equals, value = text.partition("=")
        if equals and key in ("shard", "merge", "export", "preview"):
            values[key] = value
        else:
            rest.append(text)
    task = _read_task(values["shard"]) if "shard" in values else None
    merge = values.get("merge", "false")
    if merge not in ("true", "false"):
        raise ConfigError([Fault("merge", merge, "true or false", "merge=true")])
    if task and (merge == "true" or "export" in values):
        want = "no merge or export, which come when all machines are done"
        raise ConfigError([Fault("shard", values["shard"], want, "run merge=true behind them")])
    if "preview" in values and (others := sorted(values.keys() - {"preview"})):
        want = f"no {' or '.join(others)} beside it, since it prepares nothing"
        raise ConfigError([Fault("preview", values["preview"], want, "one of them at a time")])
    if values.get("export") == "":
        raise ConfigError([Fault("export", "", "a folder to write to", "export=FOLDER")])
    export = Path(values["export"]).expanduser() if "export" in values else None
    count = read_count(values["preview"]) if "preview" in values else None
    return Command(task, merge == "true", export, count), rest


def prepare(cfg: RunConfig, command: Command) -> list[Share]:
    """Do what is asked, with words for the user; the finished stores and their shares of the mixture, none for one
    machine's part of the work and for a preview."""
    settings = {
        "tokenizer_path": cfg.model.tokenizer or cfg.model.path,
        "model_vocab": architecture(cfg.model).get("vocab_size"),
        "seed": cfg.seed,
    }
    if command.preview:
        show_preview(cfg.data, command.preview, **settings)
        return []
    if command.task:
        prepare_task(cfg.data, command.task, **settings)
        return []
    folders = (merge_tasks if command.merge else ensure_stores)(cfg.data, **settings)
    stores = [TokenStore(folder) for folder in folders]
    for store in stores:
        if not (store.folder / LENGTHS).exists():
            try:
                draw_lengths(store, store.folder / LENGTHS)
            except OSError as error:  # the tokens are whole without it
                print(f"  no picture of their lengths: {store.folder}: {error.strerror or error}")
        if (store.folder / LENGTHS).exists():
            print(f"  their lengths as a picture: {store.folder / LENGTHS}")
        if command.export:
            prefix = export_megatron(store, command.export)
            print(f"  for Megatron: {prefix}.bin and .idx")
    return shares_of(cfg.data, stores)


def _read_task(text: str) -> ArrayTask:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        want = "i/N: machine i of N, with i from 0 to N - 1"
        raise ConfigError([Fault("shard", text, want, "shard=$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")])
    return ArrayTask(int(found[1]), int(found[2]))
