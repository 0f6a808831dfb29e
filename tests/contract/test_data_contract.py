"""What every source must keep, from its files to the ranks: each row on exactly one rank, and exact after any
stop."""

from __future__ import annotations

import bz2
import gzip
import json
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from stack.config.schema_data import DataConfig
from stack.data.batch import IGNORE
from stack.data.loader import Loader
from stack.data.megatron import export_megatron
from stack.data.sources import SOURCES
from stack.data.store import TokenStore
from tests.stores import prepare, store_of_ids

SEQ_LEN = 32


NUM_DOCUMENTS = 30


def texts() -> list[str]:
    return [f"{number}: " + f"word{number} " * (1 + number * number % 23) for number in range(NUM_DOCUMENTS)]


def dealt(num_files: int) -> Iterator[tuple[int, list[str]]]:
    """The texts over files of unequal sizes, in order; the first of 6 or 7 gets none."""
    ends = [NUM_DOCUMENTS * (k + 1) ** 2 // num_files**2 for k in range(num_files)]
    for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        yield number, texts()[begin:end]


def write_files(folder: Path, num_files: int) -> None:
    """Files of one document each, that stand for text and the standard library."""
    for number in range(num_files):
        text = texts()[number] + texts()[-1 - number]
        (folder / f"{number:02}.txt").write_text(text)
        (folder / f"{number:02}.py").write_text(text)


def write_lines(folder: Path, num_files: int) -> None:
    for number, part in dealt(num_files):
        content = "".join(json.dumps({"text": text}) + "\n" for text in part).encode()
        packed = [content, gzip.compress(content), zstandard.compress(content), bz2.compress(content)][
            number % 4
        ]
        (folder / f"{number}.jsonl{['', '.gz', '.zst', '.bz2'][number % 4]}").write_bytes(packed)


def write_parquet(folder: Path, num_files: int) -> None:
    for number, part in dealt(num_files):
        table = pa.table({"text": pa.array(part, pa.string()), "extra": pa.nulls(len(part))})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=4)


def write_dataset(folder: Path, num_files: int) -> None:
    """Parquet, which our own reader takes, or for an even number CSV, which `datasets` does, but for files without a row."""
    if num_files % 2:
        return write_parquet(folder, num_files)
    for number, part in dealt(num_files):
        if part:
            (folder / f"{number}.csv").write_text("\n".join(["text", *part]) + "\n")
    return None


def write_tokens(folder: Path, num_files: int) -> None:
    """By turns a pair of Megatron's, written by our export, and bare ids."""
    for number, part in dealt(num_files):
        ids = [[1 + ord(letter) for letter in text] for text in part] or [[1, 2]]
        if number % 2:
            np.array([one for document in ids for one in [*document, 0]], "<u2").tofile(
                folder / f"{number}.bin"
            )
        else:
            export_megatron(store_of_ids(folder / f"store{number}", ids), folder)


TEXT = {"train_tokenizer": True, "vocab_size": 300}
EXAMPLES: dict[str, tuple[Callable[[Path, int], None], dict]] = {
    "stdlib": (write_files, TEXT),
    "text": (write_files, TEXT | {"path": "*.txt"}),
    "jsonl": (write_lines, TEXT | {"path": "."}),
    "parquet": (write_parquet, TEXT | {"path": "."}),
    "hf": (write_dataset, TEXT | {"path": "."}),
    "tokens": (write_tokens, {"path": "*.bin", "token_eos": 0}),
    "random": (lambda *_: None, {"random_tokens": 1000, "random_document_tokens": 37}),
}
"""What writes the files of a small example of each source, and its settings; `path` is below their folder, which also
stands for the standard library."""


def make_example(source: str, num_files: int, folder: Path) -> tuple[DataConfig, TokenStore]:
    write, changes = EXAMPLES[source]
    (folder / "files").mkdir()
    write(folder / "files", num_files)
    settings = {"seq_len": SEQ_LEN, "eval_fraction": 0.1} | changes
    if "path" in settings:
        settings["path"] = str(folder / "files" / settings["path"])
    data = DataConfig(source=source, store=str(folder / "store"), **settings)  # pyright: ignore[reportArgumentType]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: str(folder / "files"))
        return data, prepare(data)


@pytest.fixture(scope="module", params=SOURCES)
def example(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DataConfig, TokenStore]]:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: str(folder / "files"))
        yield make_example(request.param, 4, folder)


def make(
    example: tuple[DataConfig, TokenStore], dp: int = 1, dp_rank: int = 0, accumulation: int = 1
) -> Loader:
    data, store = example
    return Loader(store, data, dp=dp, dp_rank=dp_rank, accumulation=accumulation, seed=7, epochs=2)


def steps_of(loader: Loader, num_steps: int = 10**6) -> list[list[tuple[int, ...]]]:
    """For each step its rows, as ids followed by labels."""
    steps = []
    while len(steps) < num_steps and (batches := loader.next_step()) is not None:
        pairs = [zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True) for batch in batches]
        steps.append([(*ids, *labels) for rows in pairs for ids, labels in rows])
    return steps


def has_target(row: tuple[int, ...]) -> bool:
    return any(label != IGNORE for label in row[len(row) // 2 :])


def check_ranks(example: tuple[DataConfig, TokenStore], dp: int, accumulation: int) -> None:
    """Every row is on one rank, and every token but the first of a document is a target of one row."""
    ranks = [steps_of(make(example, dp, rank, accumulation)) for rank in range(dp)]
    assert {len(steps) for steps in ranks} == {2 * make(example, dp, 0, accumulation).steps_per_epoch}
    for step in zip(*ranks, strict=True):
        assert len({len(rows) for rows in step}) == 1, "as many micro-batches on every rank"
    seen = Counter(row for steps in ranks for rows in steps for row in rows if has_target(row))
    reference = Counter(row for rows in steps_of(make(example)) for row in rows if has_target(row))
    assert seen == reference and seen
    documents = make(example).account.documents
    targets = sum(
        sum(label != IGNORE for label in row[len(row) // 2 :]) * times for row, times in seen.items()
    )
    assert targets == 2 * (make(example).account.tokens - documents)


@pytest.mark.parametrize("num_files", range(1, 8))
@pytest.mark.parametrize("source", SOURCES)
def test_ranks_are_disjoint_and_complete(source: str, num_files: int, tmp_path: Path) -> None:
    """1 to 5 ranks, 1 to 7 files of unequal sizes."""
    example = make_example(source, num_files, tmp_path)
    for dp in range(1, 6):
        check_ranks(example, dp, accumulation=1 + dp % 3)


@pytest.mark.parametrize("packing", ["concat", "best_fit", "document"])
def test_slices_of_all_ranks_are_the_whole_rows(example: tuple[DataConfig, TokenStore], packing: str) -> None:
    """At a number of ranks that divides no row."""
    data, store = example
    data = replace(data, packing=packing, seq_len=SEQ_LEN, micro_batch=2)  # type: ignore[arg-type]
    settings = {"dp": 1, "dp_rank": 0, "accumulation": 2, "seed": 7, "epochs": 1}
    ranks = [Loader(store, data, **settings, sp=3, sp_rank=rank) for rank in range(3)]  # type: ignore[arg-type]
    whole = Loader(store, data, **settings)  # type: ignore[arg-type]
    while (batches := whole.next_step()) is not None:
        slices = [rank.next_step() or [] for rank in ranks]
        for want, *got in zip(batches, *slices, strict=True):
            for name in ("input_ids", "labels", "position_ids"):
                rows = torch.cat([getattr(each, name) for each in got], 1)[:, :SEQ_LEN]
                assert torch.equal(rows, getattr(want, name))
    assert [rank.next_step() for rank in ranks] == [None] * 3
    for loader in (whole, *ranks):
        loader.close()


def test_resume_is_exact_twice_at_every_step(example: tuple[DataConfig, TokenStore]) -> None:
    whole = steps_of(make(example, accumulation=3))
    for stop in range(len(whole)):
        states = []
        for again in (stop, min(stop + 2, len(whole))):
            loader = make(example, accumulation=3)
            if states:
                loader.load_state(json.loads(json.dumps(states[-1])))
            steps_of(loader, again - (stop if states else 0))
            states.append(loader.state())
            rest = make(example, accumulation=3)
            rest.load_state(states[-1])
            assert steps_of(rest) == whole[again:]


def test_preparing_again_gives_the_same(example: tuple[DataConfig, TokenStore]) -> None:
    data, store = example
    assert prepare(data).folder == store.folder
    again = prepare(DataConfig(**{**vars(data), "store": f"{data.store}-again"}))
    assert again.info == store.info and again.folder != store.folder


def test_a_position_is_small(example: tuple[DataConfig, TokenStore]) -> None:
    assert len(json.dumps(make(example).state())) < 500
