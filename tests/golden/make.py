"""Makes `curve.json`: python -m tests.golden.make

Only after a change that is meant to change training, with the reason in CHANGELOG.md: the file is what all later versions
are held to. It is made by one process without sharding, splitting or levers, in fp32, on a CPU; see `curve.py`.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict

from tests.golden.curve import CASES, FIRST, OPTIMIZERS, RUN, STORED, train
from tests.ranks import Case, run_cases


def main() -> None:
    world = CASES[FIRST][0]
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: Case(train, (FIRST, name, folder)) for name in OPTIMIZERS}
        curves = {name: outcome.get()[0] for name, outcome in run_cases(world, cases, init=False).items()}
    stored = {
        "made by": "python -m tests.golden.make",
        "overrides": [*RUN, *CASES[FIRST][1].split()],
        "optimizers": OPTIMIZERS,
        "curves": {name: asdict(curve) for name, curve in curves.items()},
    }
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    for name, curve in curves.items():
        print(f"{name}: loss {curve.loss[0]:.4f} -> {curve.loss[-1]:.4f}, held-out {curve.eval_loss[-1]:.4f}")


if __name__ == "__main__":
    main()
