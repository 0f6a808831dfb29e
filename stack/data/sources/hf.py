"""A Hugging Face dataset: by its name on the hub, a local folder with data files, or one that `save_to_disk` wrote.

A local folder of Parquet or JSON Lines is read as those sources read it (`hf_folder.py`). All else goes through `datasets`:
the hub and other files streamed, so that nothing is copied to the cache beside what is read, each file a unit, since a
stream cannot be entered in its midst; a saved dataset read in place, in units of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from stack.data.sources.base import Document, Source, SourceRequest, Tally, Unit
from stack.data.sources.files import FoundFiles, check_unchanged, find_files, identify_files
from stack.data.sources.hf_folder import explain, open_folder
from stack.data.sources.parquet import text_size
from stack.data.sources.records import RecordReader
from stack.dist.network import hub_reachable
from stack.errors import ConfigError, DataError, Fault

SAVED = ("dataset_dict.json", "state.json")
"""What `save_to_disk` writes into a folder of several splits, and of one."""


def open_dataset(request: SourceRequest) -> Source:
    """`data.source=hf data.path=NAME_OR_FOLDER data.subset=... data.split=train`. Raises ConfigError, DataError."""
    data = request.data
    if not data.path:
        raise ConfigError([Fault("data.path", data.path, "a dataset's name or folder", "data.path=NAME")])
    folder = Path(data.path).expanduser()
    if folder.is_dir() and not _is_saved(folder):
        return open_folder(folder, data) or HuggingFaceSource(request)
    return HuggingFaceSource(request)


class HuggingFaceSource:
    """A dataset that `datasets` reads."""

    num_ids = None

    def __init__(self, request: SourceRequest):
        data = request.data
        assert data.path, "open_dataset looks at it"
        self.reader = RecordReader(data)
        self.subset, self.split = data.subset, data.split
        folder = Path(data.path).expanduser()
        self.folder = folder if folder.is_dir() else None
        self.saved = self.folder is not None and _is_saved(self.folder)
        self.path = str(folder) if self.folder else data.path
        self.found = find_files(self.path, "dataset") if self.folder else FoundFiles()
        self.files = self.found.files
        self.total_bytes = sum(file.size for file in self.files)
        self.revision = None if self.folder else data.revision or _newest_commit(data.path)

    def identity(self) -> object:
        """A local folder is its files; a dataset on the hub is its commit."""
        place = identify_files(self.files) if self.folder else [self.path, self.revision]
        return ["hf", self.reader.identity, self.subset, self.split, place]

    def check_unchanged(self, unit: Unit | None = None) -> None:
        """Which file holds which rows is known to `datasets` alone."""
        check_unchanged(self.files)

    def units(self, size: int, cut: re.Pattern[str] | None, tally: Tally) -> list[Unit]:
        """Items are the dataset's shards; of a saved dataset, its rows."""
        dataset = self._dataset
        if not self.saved:
            self.found.report(tally)
            return [Unit(number, number + 1, 1) for number in range(dataset.num_shards)]
        num_rows, num_bytes = dataset.num_rows, dataset.data.nbytes
        each = max(size * num_rows // max(num_bytes, 1), 1)
        starts = range(0, num_rows, each)
        return [Unit(first, min(first + each, num_rows), min(each, num_rows - first)) for first in starts]

    def documents(self, unit: Unit, tally: Tally) -> Iterator[Document]:
        """Rows are counted from 1 through the shard, or through a saved dataset."""
        if self.saved:
            rows, first = self._dataset.select(range(unit.first, unit.last)), unit.first
            place, where = "", f"{self.path}, "
        else:
            rows, first = self._dataset.shard(self._dataset.num_shards, unit.first), 0
            place, where = f"{unit.first}:", f"{self.path}, shard {unit.first}, "
        number = first
        try:
            for number, record in enumerate(rows, start=first + 1):
                name, size = f"{place}{number}", text_size(record)
                document = self.reader.document(record, name, f"{where}row {number}", size, tally)
                if document is not None:
                    yield document
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  each file format and file system has errors of its own
            detail = f"the rest cannot be read ({explain(error)})"
            tally.fault("unreadable", f"{where}after row {number}", 0, detail)

    @cached_property
    def _dataset(self) -> Any:
        """Opened in each process anew: it does not travel."""
        import datasets  # heavy, and only this source needs it

        datasets.disable_progress_bars()
        try:
            if self.saved:
                loaded = self._choose_split(datasets.load_from_disk(self.path))
            else:
                loaded = datasets.load_dataset(
                    self.path, self.subset, split=self.split, streaming=True, revision=self.revision
                )
        except Exception as error:  # as above
            fix = "check data.path, data.subset and data.split"
            raise DataError(
                f"data.path={self.path}, split {self.split}: no dataset that `datasets` can load ({explain(error)}). "
                f"Fix: {fix}"
            ) from error
        return loaded if self.reader.whole or not loaded.column_names else self._select(loaded)

    def _choose_split(self, loaded: Any) -> Any:
        """The split of a saved dataset that was asked for. Raises ValueError if it is not there."""
        if self.subset is not None:
            raise ValueError(f"a saved dataset has no subsets such as {self.subset}: data.subset=null")
        if isinstance(loaded, dict):
            if self.split not in loaded:
                raise ValueError(f"its splits are {', '.join(map(str, loaded))}")
            return loaded[self.split]
        own = None if loaded.split is None else str(loaded.split)
        if own is None and self.split != "train":  # the default, which says nothing
            raise ValueError("it was saved without splits: data.split=train takes all of it")
        if own is not None and self.split != own and not own.startswith(f"{self.split}["):
            raise ValueError(f"all of it is split {own}: data.split='{own}'")
        return loaded

    def _select(self, loaded: Any) -> Any:
        """Only the column of the text: the others may be images."""
        return (
            loaded.select_columns([self.reader.field]) if self.reader.field in loaded.column_names else loaded
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_dataset"}


def _is_saved(folder: Path) -> bool:
    return any((folder / name).exists() for name in SAVED)


def _newest_commit(name: str) -> str:
    """Commit of a dataset's main branch, from the hub. Raises DataError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    fix = "check data.path; without a network, set data.revision to the commit that was prepared"
    if not hub_reachable():
        raise DataError(
            f"data.path={name}: no such folder here, and the hub cannot be reached to look for a dataset of this name. "
            f"Fix: {fix}"
        )
    try:
        return str(HfApi().dataset_info(name).sha)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DataError(
            f"data.path={name}: the hub gave no dataset ({explain(error)}). Fix: {fix}"
        ) from error
