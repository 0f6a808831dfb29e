"""Train a model: `deepspeed launch/train.py +exp=NAME [group=choice ...] [setting=value ...]`; see `--help`.

Also starts under torchrun and srun, and as one plain process. Nothing heavy is imported before the settings
are known to be right, so questions such as `--cfg job` are answered at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled and from any folder


def without_local_rank(arguments: list[str]) -> list[str]:
    """The deepspeed launcher adds `--local_rank=N`, older ones `--local-rank N`; Hydra refuses both, and the
    environment says it anyway."""
    kept, skip = [], False
    for text in arguments:
        flag, equals, _ = text.partition("=")
        if skip:
            skip = False
        elif flag in ("--local_rank", "--local-rank"):
            skip = not equals
        else:
            kept.append(text)
    return kept


def main() -> None:
    """Compose, then run; whatever the user can mend is said in one message."""
    sys.argv[1:] = without_local_rank(sys.argv[1:])
    from stack.dist.failure import clear_errors

    with clear_errors():
        from stack.config.compose import from_command_line
        from stack.dist.env import read_rank_env, use_growing_segments

        cfg = from_command_line(sys.argv[1:], lambda: read_rank_env(os.environ).world)
        if cfg is None:
            return
        use_growing_segments(os.environ)
        from stack.train.run import run

        run(cfg)


if __name__ == "__main__":
    main()
