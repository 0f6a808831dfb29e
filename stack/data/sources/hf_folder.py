"""A local folder of data files as a dataset of Hugging Face: what `datasets` would read for a subset and a split, read by
our own readers, which look at one field and so take files whose other columns differ.

Which files are which split is for `datasets` to say: the `configs` of a README.md; else `data/SPLIT-00000-of-00001.*`; else
names or folders with train, validation, test and their kin in them; else everything is `train`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stack.config.schema_data import DataConfig
from stack.data.sources.base import Source
from stack.data.sources.files import FoundFiles, find_files
from stack.data.sources.jsonl import NAMES, JsonLinesFiles
from stack.data.sources.parquet import ParquetFiles
from stack.errors import DataError

FIRST_LINE_BYTES = 1 << 20


def open_folder(folder: Path, data: DataConfig) -> Source | None:
    """The source of the folder's split; None if its files are of another kind, which `datasets` reads. Raises DataError
    for a subset or a split that is not there."""
    config = _config_of(folder, data)
    splits: dict[str, Any] = config.data_files or {}
    if data.split not in splits:
        raise DataError(
            f"data.split={data.split}: expected one of the splits in data.path={folder}: {', '.join(map(str, splits)) or 'none'}. "
            "Fix: data.split=NAME of one of them"
        )
    names = dict.fromkeys(map(str, splits[data.split]))  # once each: two patterns may give one file
    files = [Path(name) for name in names]
    if not all(file.is_file() for file in files):  # an address, or a file in an archive
        return None
    choice = [[data.subset, data.split]]
    if all(file.name.lower().endswith(".parquet") for file in files):
        return ParquetFiles(data, "hf parquet", _found(folder, files, splits), choice)
    if getattr(config, "field", None) is None and all(_is_lines(file) for file in files):
        return JsonLinesFiles(data, "hf jsonl", _found(folder, files, splits), choice)
    return None


def explain(error: Exception) -> str:
    """The kind of an error and its first line."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line:.300}"


def _config_of(folder: Path, data: DataConfig) -> Any:
    import datasets  # heavy, and only this source needs it

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset_builder(str(folder), data.subset).config
    except Exception as error:  # each file format and file system has errors of its own
        fix = "check data.path and data.subset"
        raise DataError(
            f"data.path={folder}, subset {data.subset}: no dataset that `datasets` can load ({explain(error)}). Fix: {fix}"
        ) from error


def _found(folder: Path, files: list[Path], splits: dict[str, Any]) -> FoundFiles:
    """Files of a split, by their places; what is in no split is passed over."""
    root, found = folder.resolve(), FoundFiles()
    in_splits = {os.path.abspath(str(name)) for names in splits.values() for name in names}
    beside = find_files(str(root), "dataset")
    found.passed_over, found.broken = beside.passed_over, beside.broken
    for file in beside.files:
        if os.path.abspath(file.path) not in in_splits:
            found.pass_over(file.path)
    for file in files:
        found.add(file, root if file.is_relative_to(root) else Path(file.anchor))
    found.files.sort(key=lambda file: os.fsencode(file.place))
    return found


def _is_lines(path: Path) -> bool:
    """Whether a file is of JSON Lines: by its name, or where that is .json by its first line."""
    if path.name.lower().endswith(NAMES):
        return True
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        line = file.readline(FIRST_LINE_BYTES)
    try:
        return len(line) == FIRST_LINE_BYTES or isinstance(json.loads(line), dict)
    except ValueError:
        return False
