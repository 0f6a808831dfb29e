"""How long a store of many documents takes to open, and in how much memory:

    python -m tests.prepare_opening                # 10 million documents

Not part of the test suite, which asserts the memory alone: it judges by the clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from stack.data.shards import INDEX, ShardWriter, UnitRecord, join_shards, unit_paths
from stack.data.store import TokenStore


def write_large_store(folder: Path, num_documents: int, num_shards: int = 10) -> None:
    """A store of documents of two tokens each, written as preparation does, but for the loop over documents."""
    records: list[UnitRecord] = []
    for number in range(num_shards):
        count = num_documents // num_shards
        writer = ShardWriter(folder, number, num_ids=2)
        writer.append(np.ones(2 * count, np.uint8))
        record = writer.commit()
        index = np.empty(count, INDEX)
        index["end"] = np.arange(2, 2 * count + 2, 2)
        index["place"] = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        unit_paths(folder, number)[0].write_bytes(index.tobytes())
        record.num_documents = count
        records.append(record)
    join_shards(
        folder, records, num_ids=2, source="test", text=None, text_bytes=0, tokenizer=None, eos_id=None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=10_000_000)
    count = parser.parse_args().documents
    with tempfile.TemporaryDirectory() as name:
        write_large_store(Path(name), count)
        process = psutil.Process()
        before, begin = process.memory_info().rss, time.perf_counter()
        store = TokenStore(Path(name))
        seconds = time.perf_counter() - begin
        grown_mib = (process.memory_info().rss - before) / 2**20
        figures = {"documents": store.num_documents, "seconds": seconds, "grown_mib": grown_mib}
        holds = {"under a second": seconds < 1.0, "under 100 MB": grown_mib < 100}
        print(json.dumps(figures | {"holds": holds}, indent=1))


if __name__ == "__main__":
    main()
