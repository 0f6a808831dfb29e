"""What feeding takes at scale, each case in a fresh process:

    python -m tests.feeding_scale                                     # 10 million documents; a row of 1,048,576 tokens
    python -m tests.feeding_scale --documents 200000 --tokens 65536

First the opening of a loader over a store of many documents: seconds, memory above that of the imports, padding. Then what
one rank of a sequence-parallel group reads of a long row, beside what its slice is. Tokens are holes in sparse files, so
the disk is not what is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.stores import sparse_store

MIB = 1024**2
SEQ_LEN = 8192
MEAN_TOKENS = 600


def lengths_of(documents: int, mean: int) -> np.ndarray:
    """Tokens of each document, log-normal as those of web text are, int64."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, size=documents)
    return np.maximum(drawn, 1).astype(np.int64)


def peak_bytes() -> int:
    """The most resident memory of this process so far, files it maps included."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in status if line.startswith("VmHWM")))


def open_loader(folder: Path, packing: str) -> dict[str, Any]:
    """A loader over the store, and a step of it."""
    from stack.config.schema_data import DataConfig
    from stack.data.loader import Loader
    from stack.data.store import TokenStore

    data = DataConfig(packing=packing, seq_len=SEQ_LEN, eval_fraction=0.02, micro_batch=8)  # type: ignore[arg-type]
    before, start = peak_bytes(), time.perf_counter()
    loader = Loader(TokenStore(folder), data, dp=1, dp_rank=0, accumulation=1, seed=1)
    opened_s, opened = time.perf_counter() - start, peak_bytes() - before
    begin = time.perf_counter()
    steps = 5
    for _ in range(steps):
        loader.next_step()
    row_s = (time.perf_counter() - begin) / (8 * steps)
    loader.close()
    account = loader.account
    padding = account.padding / (account.padding + account.tokens)
    return {"opened_s": opened_s, "opened": opened, "row_s": row_s, "rows": account.rows, "padding": padding}


def read_slices(folder: Path, packing: str, seq_len: int, sp: int) -> dict[str, Any]:
    """Some steps of one rank in the middle of its group, with what it read of the store's files."""
    from stack.config.schema_data import DataConfig
    from stack.data.loader import Loader
    from stack.data.store import TokenStore

    store, read = TokenStore(folder), [0]
    plain = store.read

    def counted(begin: int, end: int) -> np.ndarray:
        read[0] += end - begin
        return plain(begin, end)

    store.read = counted  # type: ignore[method-assign]
    data = DataConfig(packing=packing, seq_len=seq_len, eval_fraction=0.0, workers=0)  # type: ignore[arg-type]
    loader = Loader(store, data, dp=1, dp_rank=0, accumulation=1, seed=1, sp=sp, sp_rank=sp // 2)
    loader.next_step()
    read[0], before, steps = 0, peak_bytes(), 4
    for _ in range(steps):
        loader.next_step()
    item = np.dtype(store.info.dtype).itemsize
    return {"bytes": item * read[0] / steps, "memory": peak_bytes() - before}


def afresh(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """In a process of its own, whose memory nothing else has grown."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the long row")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        many, books = Path(place) / "many", Path(place) / "books"
        sparse_store(many, lengths_of(given.documents, MEAN_TOKENS))
        for packing in ("concat", "best_fit", "document"):
            found = afresh(open_loader, many, packing)
            print(
                f"{given.documents:,} documents, {packing}: loader open in {found['opened_s']:.2f} s with "
                f"{found['opened'] / MIB:.0f} MiB, {found['rows']:,} rows of {SEQ_LEN:,} tokens, {found['padding']:.2%} padding, "
                f"{1e3 * found['row_s']:.2f} ms a row",
                flush=True,
            )
        sparse_store(books, lengths_of(64, given.tokens // 8))
        for sp in (1, 2, 4, 8):
            found, local = afresh(read_slices, books, "concat", given.tokens, sp), given.tokens // sp
            print(
                f"row of {given.tokens:,} tokens, SP {sp}: a rank reads {found['bytes'] / 1e6:.3f} MB of the files for its "
                f"{local:,} tokens ({found['bytes'] / local:.3f} bytes a token), memory grows by {found['memory'] / MIB:.1f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
