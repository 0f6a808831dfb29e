"""The run behind the golden curve, the configurations that must give the same curve, and how far one is from it.

All train the same small model from the same seed on the same rows for 20 steps, by the whole way of a real run:
`compose_config`, then `stack.train.run.run`, and the numbers are read from the run's own `metrics.jsonl`. The rows come
from `text.jsonl`: 33 documents from 3 to 400 characters, packed; 13 rows, so that every fourth step is a window of one row.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from stack.config.compose import compose_config

HERE = Path(__file__).parent
STORED = HERE / "curve.json"
STEPS = 20
RUN = [
    "+exp=tiny_cpu",
    "data=jsonl",
    "data.train_tokenizer=true",
    "data.vocab_size=272",
    "model.architecture.vocab_size=272",
    "data.eval_fraction=0.15",
    "data.seq_len=256",
    "memory.loss_tile=100",  # tiles that are uneven for every split
    "memory.mlp_tile=75",
    "checkpoint=none",
    "log.eval_rows=3",
    "log.eval_every=10",
    f"schedule.steps={STEPS}",
]
OPTIMIZERS = {
    "adamw": [
        "optim=adamw",
        "optim.lr=2e-2",
        "schedule.warmup_steps=3",
    ],  # decay, clipping at 1, cosine: as real runs
    "sgd": [
        "optim=sgd",
        "optim.lr=0.3",
        "optim.clip=0",
    ],  # shows a constant factor in the gradient, which Adam hides
}
KEYS = ("loss", "grad_norm", "eval_loss")
FIRST = "one process"
"""The configuration that the stored curve was made with: no sharding, no splitting, no lever."""

LEVERS_OFF = "memory=plain"
CASES: dict[str, tuple[int, str]] = {
    FIRST: (1, f"engine=zero0 {LEVERS_OFF} data.micro_batch=4"),
    "one process, all levers": (1, "engine=zero3 memory=alst data.micro_batch=4"),
    "one process, accumulation 4": (1, f"engine=zero2 {LEVERS_OFF} data.micro_batch=1 engine.accumulation=4"),
    "sp 2": (2, f"parallel=sp2 engine=zero0 {LEVERS_OFF} data.micro_batch=4"),
    "sp 2, zero 2, accumulation 2": (
        2,
        "parallel=sp2 engine=zero2 memory=alst data.micro_batch=2 engine.accumulation=2",
    ),
    "sp 2, zero 3, all levers": (2, "parallel=sp2 engine=zero3 memory=alst data.micro_batch=4"),
    "dp 2": (2, f"engine=zero0 {LEVERS_OFF} data.micro_batch=2"),
    "dp 2, zero 2, accumulation 2": (
        2,
        f"engine=zero2 {LEVERS_OFF} data.micro_batch=1 engine.accumulation=2",
    ),
    "dp 2, zero 3, all levers": (2, "engine=zero3 memory=alst data.micro_batch=2"),
    "tiled loss": (2, f"parallel=sp2 engine=zero3 {LEVERS_OFF} memory.tiled_loss=true data.micro_batch=4"),
    "tiled MLP": (2, f"parallel=sp2 engine=zero3 {LEVERS_OFF} memory.tiled_mlp=true data.micro_batch=4"),
    "checkpointing": (2, "parallel=sp2 engine=zero3 memory=checkpoint data.micro_batch=4"),
    "lean layers": (2, "parallel=sp2 engine=zero3 memory=lean data.micro_batch=4"),
    "dp 2, lean layers, accumulation 2": (
        2,
        "engine=zero1 memory=lean data.micro_batch=1 engine.accumulation=2",
    ),
    "offload": (2, "parallel=sp2 engine=zero3 memory=checkpoint memory.offload=true data.micro_batch=4"),
}
"""name -> (ranks, overrides). Rows in a step are 4 in all: micro_batch x accumulation x ranks / sp."""

WITH_SGD = (
    FIRST,
    "one process, accumulation 4",
    "sp 2",
    "sp 2, zero 3, all levers",
    "lean layers",
    "dp 2, zero 2, accumulation 2",
)
RUNS = [(name, "adamw") for name in CASES] + [(name, "sgd") for name in WITH_SGD]
"""(case, optimizer) of every run that is held to a curve."""


@dataclass
class Curve:
    """What a run showed. loss, grad_norm: of each step; eval_loss: after steps 10 and 20; targets: of each step; tokens:
    SHA-256 of the token store, so that another tokenizer is not taken for another training."""

    loss: list[float]
    grad_norm: list[float]
    eval_loss: list[float]
    targets: list[int]
    tokens: str


@dataclass
class Gap:
    """Relative distance of two curves: the largest and the mean over the steps, for each of KEYS."""

    largest: dict[str, float] = field(default_factory=dict)
    mean: dict[str, float] = field(default_factory=dict)


def gap_of(got: Curve, want: Curve) -> Gap:
    gap = Gap()
    for key in KEYS:
        pairs = zip(getattr(got, key), getattr(want, key), strict=True)
        gaps = [abs(mine / other - 1.0) for mine, other in pairs]
        gap.largest[key], gap.mean[key] = max(gaps), sum(gaps) / len(gaps)
    return gap


def overrides_of(case: str, optimizer: str, folder: str) -> list[str]:
    places = [f"name={case}-{optimizer}".replace(" ", "_").replace(",", ""), f"out={folder}/runs"]
    places += [f"data.store={folder}/data", f"data.path={HERE / 'text.jsonl'}"]
    return [*RUN, *OPTIMIZERS[optimizer], *CASES[case][1].split(), *places]


def train(case: str, optimizer: str, folder: str) -> Curve:
    """On each rank of one start: the run, and its curve. Rank variables say where this rank stands."""
    cfg = compose_config(overrides_of(case, optimizer, folder))
    from stack.dist.topology import Topology
    from stack.train.run import run

    # DeepSpeed keeps groups in globals that do not outlive the process groups, and the next case needs them.
    Topology.close = lambda self: None  # type: ignore[method-assign]
    os.environ["OMP_NUM_THREADS"] = "1"
    run(cfg)
    return read(Path(cfg.out) / cfg.name / "metrics.jsonl", Path(cfg.data.store))


def read(journal: Path, store: Path) -> Curve:
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    return Curve(
        loss=[record["loss"] for record in records],
        grad_norm=[record["grad_norm"] for record in records],
        eval_loss=[record["eval_loss"] for record in records if "eval_loss" in record],
        targets=[record["targets"] for record in records],
        tokens=json.loads(next(store.glob("*/store.json")).read_text())["content"],
    )
