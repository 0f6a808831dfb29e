"""Sources of documents, one a file.

To add one: write `sources/NAME.py` with a class that follows `base.Source` and takes a `base.SourceRequest`
(`files.FileSource` is the base of those that read files, `records.RecordFiles` of those that hold records); it cuts itself
into units that a process can read by itself, and picklable is all that a worker asks of it. Add it to SOURCES below, its
name to `SourceName` in the schema, and a `conf/data/NAME.yaml`.
`tests/contract/test_data_contract.py` runs over every entry of SOURCES: give it one line there that says how
to make a small example.
"""

from __future__ import annotations

from collections.abc import Callable

from stack.config.schema_data import SourceName
from stack.data.sources.base import Document, Source, SourceRequest, Tally, Unit, all_documents
from stack.data.sources.hf import open_dataset
from stack.data.sources.jsonl import JsonLinesSource
from stack.data.sources.parquet import ParquetSource
from stack.data.sources.random import RandomSource
from stack.data.sources.stdlib import StandardLibrarySource
from stack.data.sources.text import TextSource
from stack.data.sources.tokens import TokenFilesSource

SOURCES: dict[SourceName, Callable[[SourceRequest], Source]] = {
    "stdlib": StandardLibrarySource,
    "text": TextSource,
    "jsonl": JsonLinesSource,
    "parquet": ParquetSource,
    "hf": open_dataset,
    "tokens": TokenFilesSource,
    "random": RandomSource,
}

__all__ = ["SOURCES", "Document", "Source", "SourceRequest", "Tally", "Unit", "all_documents"]
