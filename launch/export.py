"""Write a checkpoint of a run as a Hugging Face folder, on a host without ranks or devices:

    python launch/export.py run=runs/quickstart
    python launch/export.py run=runs/quickstart step=200 out=model dtype=bf16 push=user/name

run:   folder of the run; nothing else is needed, neither the model's folder nor the tokens
step:  of the checkpoint; left out, the newest whole one
out:   folder to write, complete or not at all; left out, hf_step_NNNNNN in the run's folder
dtype: bf16, fp16 or fp32; left out, the type that the run computed with
push:  user/name on the Hugging Face hub, made private if it is new

The files are those that the end of a run writes. Memory: one file of weights, 4 GiB at most, whatever the model's size.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled and from any folder


def main() -> None:
    """Answer --help at once; else read the arguments, export."""
    if not sys.argv[1:] or {"--help", "-h"} & set(sys.argv[1:]):
        print(__doc__)
        return
    from stack.dist.failure import clear_errors

    with clear_errors():
        from stack.checkpoint.export_run import export_run, read_arguments

        export_run(read_arguments(sys.argv[1:]))


if __name__ == "__main__":
    main()
