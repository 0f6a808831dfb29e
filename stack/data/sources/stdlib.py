"""The Python files of the standard library: real text that every machine has (12 MB, 730 files in Python
3.11)."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from stack.data.sources.base import Document, SourceRequest, Tally, Unit
from stack.data.sources.files import FoundFiles, find_files, identify_files
from stack.data.sources.text import TextFiles
from stack.errors import DataError

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Installed packages differ by machine; test folders hold files in other encodings on purpose."""


class StandardLibrarySource(TextFiles):
    """`data.source=stdlib`. A file that is not UTF-8 is left out and counted, since the user cannot mend
    it."""

    def __init__(self, request: SourceRequest):
        del request  # one library, no settings
        folder = Path(sysconfig.get_path("stdlib"))
        try:
            found = find_files(str(folder), "stdlib", (".py",))
        except DataError as error:
            fix = "data=text data.path=<folder with text>"
            raise DataError(f"no Python files of the standard library in {folder}. Fix: {fix}") from error
        kept = [one for one in found.files if not SKIPPED_FOLDERS & set(one.place.split("/")[:-1])]
        super().__init__(FoundFiles(kept))  # what else an installation holds is no text of the user's

    def identity(self) -> object:
        return ["stdlib", platform.python_version(), identify_files(self.files)]

    def documents(self, unit: Unit, tally: Tally) -> Iterator[Document]:
        lenient = Tally("skip", tally.dropped)
        return super().documents(unit, lenient)
