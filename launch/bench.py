"""Compare memory presets with each other and with a baseline from DeepSpeed's and transformers' own pieces, on this
machine, in one run:

    python launch/bench.py
    python launch/bench.py --contenders baseline,lean --lengths 4096,16384 --out runs/bench_small

It starts its own ranks: two on the CPU, or one for each GPU. Table on the console, bench.json and bench.png in the folder
of `--out`. Settings of all contenders go behind the options, as for launch/train.py: model=qwen3_0_6b parallel.sp=2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled and from any folder


def main() -> None:
    """Read the command line, run."""
    from stack.dist.failure import clear_errors

    with clear_errors():
        import torch

        from stack.bench.run import run_bench
        from stack.bench.settings import read_arguments
        from stack.errors import LaunchError

        if "RANK" in os.environ or "LOCAL_RANK" in os.environ:
            raise LaunchError(
                "the benchmark starts its own ranks. Fix: python launch/bench.py, without a launcher"
            )
        run_bench(read_arguments(sys.argv[1:], torch.cuda.device_count()))


if __name__ == "__main__":
    main()
