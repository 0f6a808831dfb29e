"""What a run needs before it is submitted: does it fit, memory, host, disk, time.

    python launch/plan.py +exp=qwen3_1m site=h100x8
    python launch/plan.py +exp=qwen3_1m site=h100x8 search=max_seq
    python launch/plan.py +exp=qwen3_1m site=h100x8 sweep=seq:131072,262144,524288
    python launch/plan.py +exp=qwen3_1m site=h100x8 exact=true

No GPU, no weights, no network. Settings are those of launch/train.py; `--help` lists the words beside them. Exit code: 0 it
fits, 3 tight, 4 does not fit, 5 unproven (beyond what has been compared with runs, or an unknown machine), 1 wrong settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled and from any folder


def main() -> None:
    """Plan, or measure this machine."""
    from stack.dist.failure import clear_errors

    with clear_errors():
        from stack.plan.command import WORDS, read_arguments, run_command

        arguments = sys.argv[1:]
        if {"-h", "--help"} & set(arguments):
            print(__doc__, *(f"  {word:<13}{text}" for word, text in WORDS.items()), sep="\n")
            return
        if read_arguments(arguments).flag("probe", False):
            from stack.bench.probe import probe_command

            probe_command(arguments)
            return
        code = run_command(arguments, count_exactly)
    sys.exit(code)


def count_exactly(*arguments):
    """`stack/bench/exact.py: count`, imported where it is wanted: it brings torch and DeepSpeed."""
    from stack.bench.exact import count

    return count(*arguments)


if __name__ == "__main__":
    main()
