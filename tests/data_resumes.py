"""Token streams through random stops: each run is broken off behind a random step and goes on at another number of ranks,
workers and steps read ahead, again and again to its end. What it reads is held by hash to an unbroken run on one rank.

    python -m tests.data_resumes --resumes 200      # about a minute on two cores
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stack.config.schema_data import DataConfig
from stack.data.loader import Loader
from stack.data.mixture import Share
from tests.stores import store_of_ids

ROWS_PER_STEP = 12
EPOCHS = 3
STREAMS = ("input_ids", "labels", "position_ids")


@dataclass(frozen=True)
class Shape:
    """How the rows of a step are split, and how they are read ahead."""

    dp: int
    sp: int
    micro_batch: int
    workers: int
    prefetch: int

    @property
    def accumulation(self) -> int:
        return ROWS_PER_STEP // (self.dp * self.micro_batch)


ALONE = Shape(dp=1, sp=1, micro_batch=1, workers=0, prefetch=1)


def random_shape(generator: random.Random) -> Shape:
    dp = generator.choice([1, 2, 3, 4])
    fits = [size for size in (1, 2, 3) if ROWS_PER_STEP % (dp * size) == 0]
    sp, workers = generator.choice([1, 1, 2, 3]), generator.choice([0, 1, 2, 4])
    return Shape(dp, sp, generator.choice(fits), workers, generator.choice([1, 2, 5]))


class Ranks:
    """The loaders of all ranks of a run."""

    def __init__(self, shares: list[Share], data: DataConfig, shape: Shape, state: dict[str, Any] | None):
        data = replace(data, micro_batch=shape.micro_batch, workers=shape.workers, prefetch=shape.prefetch)
        self.loaders = [
            [
                Loader(
                    shares,
                    data,
                    dp=shape.dp,
                    dp_rank=dp_rank,
                    sp=shape.sp,
                    sp_rank=sp_rank,
                    accumulation=shape.accumulation,
                    seed=7,
                    epochs=EPOCHS,
                )
                for sp_rank in range(shape.sp)
            ]
            for dp_rank in range(shape.dp)
        ]
        self.seq_len = data.seq_len
        for loader in (loader for group in self.loaders for loader in group) if state is not None else ():
            loader.load_state(json.loads(json.dumps(state)))

    def step(self) -> list[str] | None:
        """Hashes of the rows of the next step in their order, whatever rank read them; None at the end."""
        steps = [[loader.next_step() for loader in group] for group in self.loaders]
        if steps[0][0] is None:
            assert all(batches is None for group in steps for batches in group), "all ranks end together"
            return None
        found = []
        for index in range(len(steps[0][0])):
            for group in steps:
                slices = [batches[index] for batches in group if batches is not None]
                assert all(torch.equal(each.cu_seqlens, slices[0].cu_seqlens) for each in slices)
                rows = [
                    torch.cat([getattr(each, name) for each in slices], 1)[:, : self.seq_len]
                    for name in STREAMS
                ]
                for row, tokens in enumerate(slices[0].row_tokens):
                    if tokens:
                        numbers = b"".join(stream[row].numpy().tobytes() for stream in rows)
                        found.append(hashlib.sha256(numbers).hexdigest())
        return found

    def state(self) -> dict[str, Any]:
        states = [loader.state() for group in self.loaders for loader in group]
        assert all(state == states[0] for state in states), "one position for all ranks"
        return states[0]

    def close(self) -> None:
        for loader in (loader for group in self.loaders for loader in group):
            loader.close()


def make_cases(folder: Path, generator: random.Random) -> dict[str, tuple[list[Share], DataConfig]]:
    """Stores of random documents, plain and with target masks, in every packing, and mixtures of them."""
    stores = []
    for number in range(3):
        count = generator.randint(20, 60)
        documents = [
            [generator.randrange(1000) for _ in range(generator.randint(1, 40))] for _ in range(count)
        ]
        masks = [[generator.random() < 0.3 for _ in each] for each in documents] if number == 2 else None
        stores.append(store_of_ids(folder / str(number), documents, targets=masks))
    cases = {}
    for packing in ("concat", "best_fit", "document"):
        for shuffle in (True, False):
            data = DataConfig(packing=packing, seq_len=23, eval_fraction=0.1, shuffle=shuffle)  # type: ignore[arg-type]
            cases[f"{packing}, shuffle {shuffle}"] = ([Share(stores[0])], data)
            cases[f"{packing}, masked, shuffle {shuffle}"] = ([Share(stores[2])], data)
    data = DataConfig(packing="best_fit", seq_len=23, eval_fraction=0.1, too_long="drop")
    cases["best_fit, drop"] = ([Share(stores[1])], data)
    plain = DataConfig(packing="concat", seq_len=23, eval_fraction=0.1)
    weights = [Share(stores[0], "a", weight=3.0), Share(stores[1], "b", weight=0.5)]
    passes = [
        Share(stores[0], "a", epochs=0.4),
        Share(stores[1], "b", epochs=2),
        Share(stores[2], "c", epochs=1),
    ]
    return cases | {"mixture by weight": (weights, plain), "mixture by epochs": (passes, data)}


def unbroken(shares: list[Share], data: DataConfig) -> list[list[str]]:
    """Hashes of each step's rows on one rank without workers."""
    ranks, steps = Ranks(shares, data, ALONE, None), []
    while (rows := ranks.step()) is not None:
        steps.append(rows)
    return steps


def broken(
    shares: list[Share], data: DataConfig, steps: list[list[str]], generator: random.Random, resumes: int
) -> None:
    """One run through up to `resumes` stops to its end. Raises AssertionError where it differs."""
    done, state = 0, None
    for turn in range(resumes + 1):
        shape = random_shape(generator)
        ranks = Ranks(shares, data, shape, state)
        stop = len(steps) + 1 if turn == resumes else generator.randint(done, len(steps))
        while done < stop and (rows := ranks.step()) is not None:
            assert rows == steps[done], f"step {done + 1} of {len(steps)} at {shape}, turn {turn}"
            done += 1
        state = ranks.state()
        ranks.close()
    assert done == len(steps)


def run(resumes: int, seed: int, folder: Path, tell: bool = False) -> int:
    """Runs with up to four stops each until there were as many resumes; returns how many there were."""
    generator = random.Random(seed)
    cases = make_cases(folder, generator)
    references = {name: unbroken(*case) for name, case in cases.items()}
    count = 0
    while count < resumes:
        for name, case in cases.items():
            stops = generator.randint(1, 4)
            broken(*case, references[name], generator, stops)
            count += stops
            if tell:
                print(f"{count} of {resumes} resumes equal to the unbroken run ({name})", flush=True)
            if count >= resumes:
                break
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resumes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count = run(given.resumes, given.seed, Path(folder), tell=True)
    print(f"{count} resumes: all token streams equal")


if __name__ == "__main__":
    main()
