"""Parquet: one document a row, the text in one column. Other columns are not read, so their types need not agree.

Row groups are what Parquet can enter by itself: a file goes to units of whole ones, and memory is bounded by the
largest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stack.data.sources.base import Document, SourceRequest, Tally, Unit, group_items
from stack.data.sources.files import find_files
from stack.data.sources.records import RecordFiles

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS = 256


class ParquetFiles(RecordFiles):
    """One document a row; the base of the sources of such files."""

    def units(self, size: int, cut: re.Pattern[str] | None, tally: Tally) -> list[Unit]:
        import pyarrow as pa  # 50 MB of memory that only this source needs
        import pyarrow.parquet as pq

        self.found.report(tally)
        units = []
        for number, file in enumerate(self.files):
            try:
                with _map(file.path) as mapped, pq.ParquetFile(mapped) as table:
                    groups = [
                        table.metadata.row_group(group).total_byte_size
                        for group in range(table.metadata.num_row_groups)
                    ]
            except (OSError, pa.ArrowException) as error:
                detail = f"no Parquet file ({_first_line(error)})"
                tally.fault("unreadable", str(file.path), file.size, detail)
                continue
            units += [
                Unit(number, number + 1, part.size, part.first, part.last)
                for part in group_items(groups, size)
            ]
        return units

    def documents(self, unit: Unit, tally: Tally) -> Iterator[Document]:
        """Rows are counted from 1 through the file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self.files[unit.first]
        row = 0
        try:
            with _map(file.path) as mapped, pq.ParquetFile(mapped) as table:
                row = sum(table.metadata.row_group(group).num_rows for group in range(unit.begin))
                groups = range(unit.begin, table.num_row_groups if unit.end is None else unit.end)
                for record in self._records(table, groups):
                    row += 1
                    place, where = f"{file.place}:{row}", f"{file.path}, row {row}"
                    if isinstance(record, UnicodeDecodeError):
                        detail = f"0x{record.object[record.start]:02X} is not UTF-8 ({record.reason})"
                        tally.fault("not UTF-8", where, len(record.object), detail)
                        continue
                    document = self.reader.document(record, place, where, text_size(record), tally)
                    if document is not None:
                        yield document
        except (OSError, pa.ArrowException) as error:
            where = f"{file.path}, after row {row}"
            detail = f"the rest of row groups {unit.begin} to {(unit.end or 0) - 1} cannot be read ({_first_line(error)})"
            tally.fault("unreadable", where, 0, detail)

    def _records(
        self, table: pq.ParquetFile, groups: range
    ) -> Iterator[dict[str, object] | UnicodeDecodeError]:
        """Rows; in place of one with a bad byte, what is wrong with it."""
        known = self.reader.whole or self.reader.field in table.schema_arrow.names
        columns = [self.reader.field] if known and not self.reader.whole else None
        if not known:  # every row lacks the field; one small column says how many there are
            columns = table.schema_arrow.names[:1]
        for batch in table.iter_batches(BATCH_ROWS, list(groups), columns, use_threads=False):
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError:  # raised before the first is given: row by row
                for row in range(batch.num_rows):
                    try:
                        yield from batch.slice(row, 1).to_pylist()
                    except UnicodeDecodeError as error:
                        yield error


class ParquetSource(ParquetFiles):
    """`data.source=parquet data.path=... data.text_field=text`"""

    def __init__(self, request: SourceRequest):
        super().__init__(request.data, "parquet", find_files(request.data.path, "Parquet", (".parquet",)))


def _map(path: Path) -> pa.MemoryMappedFile:
    import pyarrow as pa

    return pa.memory_map(os.fsencode(path))  # as bytes, since a name need not be UTF-8


def text_size(record: dict[str, object]) -> int:
    """Bytes of the record's texts."""
    return sum(
        len(value.encode(errors="surrogatepass")) for value in record.values() if isinstance(value, str)
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
