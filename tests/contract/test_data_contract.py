"""What every source must keep, from its files to the ranks: each row on exactly one rank, and exact after any
stop."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stack.config.schema_data import DataConfig
from stack.data.batch import IGNORE
from stack.data.loader import Loader
from stack.data.sources import SOURCES
from stack.data.store import TokenStore
from tests.stores import prepare

SEQ_LEN = 32


def write_texts(folder: Path) -> None:
    texts = [f"{number}: " + f"word{number} " * (1 + number * number % 23) for number in range(30)]
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
        (folder / f"{number:02}.py").write_text(text)
    (folder / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


EXAMPLES: dict[str, dict] = {
    "stdlib": {"train_tokenizer": True, "vocab_size": 300},
    "text": {"train_tokenizer": True, "vocab_size": 300, "path": "*.txt"},
    "jsonl": {"train_tokenizer": True, "vocab_size": 300, "path": "all.jsonl"},
    "random": {"random_tokens": 1000, "random_document_tokens": 37},
}
"""Settings that make a small example of each source; `path` is below a folder with texts, which also stands
for the standard library."""


@pytest.fixture(scope="module", params=SOURCES)
def example(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DataConfig, TokenStore]]:
    folder = tmp_path_factory.mktemp(request.param)
    write_texts(folder)
    settings = {"seq_len": SEQ_LEN, "eval_fraction": 0.1} | EXAMPLES[request.param]
    if "path" in settings:
        settings["path"] = str(folder / settings["path"])
    data = DataConfig(source=request.param, store=str(folder / "store"), **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: str(folder))
        yield data, prepare(data)


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


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_ranks_are_disjoint_and_complete(
    example: tuple[DataConfig, TokenStore], dp: int, accumulation: int
) -> None:
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
