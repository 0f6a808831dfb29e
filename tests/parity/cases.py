"""The table of cases that must train alike: every pair of values of any two factors occurs in at least one of them."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

FACTORS: dict[str, tuple] = {
    "layout": ("1", "sp2", "dp2", "sp2 x dp2", "sp4"),
    "stage": (3, 2, 1, 0),
    "accumulation": (1, 3),
    "levers": ("none", "all", "lean", "tiled_loss", "tiled_mlp", "checkpoint", "offload"),
    "tied": (False, True),
    "text": ("one document", "packed", "rank without target"),
}
LAYOUTS = {"1": (1, 1), "sp2": (2, 1), "dp2": (1, 2), "sp2 x dp2": (2, 2), "sp4": (4, 1)}
"""layout -> (sp, dp). sp4 has more ranks than the model has key/value heads."""


@dataclass(frozen=True)
class ParityCase:
    layout: str
    stage: int
    accumulation: int
    levers: str
    tied: bool
    text: str

    @property
    def world(self) -> int:
        sp, dp = LAYOUTS[self.layout]
        return sp * dp

    @property
    def name(self) -> str:
        tied = "tied" if self.tied else "untied"
        return f"{self.layout}, zero{self.stage}, accumulation {self.accumulation}, {self.levers}, {tied}, {self.text}"


def pairs_of(values: dict[str, object]) -> set[tuple]:
    return set(itertools.combinations(values.items(), 2))


def pairwise_table() -> list[ParityCase]:
    """Greedy cover: the next case is the one with the most pairs not seen yet; the first of equals, so it is stable."""
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    missing = set().union(*(pairs_of(values) for values in every))
    table = []
    while missing:
        best = max(every, key=lambda values: len(pairs_of(values) & missing))
        missing -= pairs_of(best)
        table.append(ParityCase(**best))  # type: ignore[arg-type]  # the keys are the fields by construction
    return table


EXTRA = [
    # The settings people run, whatever the greedy cover chose.
    ParityCase("sp2", 3, 3, "all", True, "packed"),
    ParityCase("sp2 x dp2", 3, 3, "all", False, "packed"),
    ParityCase("sp2", 3, 1, "none", False, "rank without target"),
    # A head whose gradient is made in forward, accumulated, shared with the embedding and split over ranks, all at once.
    ParityCase("sp2", 3, 3, "tiled_loss", True, "rank without target"),
    ParityCase("sp2", 2, 3, "tiled_loss", True, "packed"),
]
TABLE = list(dict.fromkeys(pairwise_table() + EXTRA))

if __name__ == "__main__":
    for case in TABLE:
        print(asdict(case))
