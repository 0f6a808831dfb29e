"""How much memory a step of a run takes on each GPU, counted on any machine before a GPU is asked for:

    python launch/dry_run.py +exp=qwen3_1m --ranks 8
    python launch/dry_run.py +exp=qwen3_1m --ranks 8 memory=alst

Settings are those of launch/train.py. The real step runs on tensors without memory, so no weights and no text are needed,
only the model's config: the one in conf/model where its folder is not here.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled and from any folder


def main() -> None:
    """Read the command line, count."""
    from stack.dist.failure import clear_errors

    with clear_errors():
        parser = argparse.ArgumentParser(prog="python launch/dry_run.py", description=__doc__)
        parser.add_argument("--ranks", type=int, required=True, help="ranks of the run")
        parser.add_argument("overrides", nargs="*", metavar="setting=value")
        given = parser.parse_intermixed_args()
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed takes its device when it is imported
        warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated")

        from stack.bench.dry_run import describe, dry_run
        from stack.config.compose import compose_config

        print(describe(dry_run(compose_config(given.overrides, world=given.ranks), given.ranks)))


if __name__ == "__main__":
    main()
