"""Sources of documents, one a file.

To add one: write `sources/NAME.py` with a class that follows `base.Source` and takes a `base.SourceRequest`;
add it to SOURCES below, its name to `DataConfig.source`, and a `conf/data/NAME.yaml`.
`tests/contract/test_data_contract.py` runs over every entry of SOURCES: give it one line there that says how
to make a small example.
"""

from __future__ import annotations

from collections.abc import Callable

from stack.data.sources.base import Document, Source, SourceRequest, Tally
from stack.data.sources.jsonl import JsonLinesSource
from stack.data.sources.random import RandomSource
from stack.data.sources.stdlib import StandardLibrarySource
from stack.data.sources.text import TextSource

SOURCES: dict[str, Callable[[SourceRequest], Source]] = {
    "stdlib": StandardLibrarySource,
    "text": TextSource,
    "jsonl": JsonLinesSource,
    "random": RandomSource,
}

__all__ = ["SOURCES", "Document", "Source", "SourceRequest", "Tally"]
