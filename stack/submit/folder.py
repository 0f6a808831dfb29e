"""The run folder that a command line of launch/train.py will use: `python -m stack.submit.folder +exp=NAME ...`.

Asked by `launch/slurm/job.sh` where nobody has told it. Fails as the run itself would, before any node waits for another.
"""

from __future__ import annotations

import sys

from stack.config import derive
from stack.config.compose import from_command_line
from stack.dist.failure import clear_errors

if __name__ == "__main__":
    with clear_errors():
        cfg = from_command_line(sys.argv[1:])
        if cfg is not None:
            print(derive.run_folder(cfg).expanduser().resolve())
