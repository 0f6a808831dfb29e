"""Prepare the tokens of a run ahead of it, without a device:

    python launch/prepare.py +exp=quickstart
    python launch/prepare.py +exp=qwen3_1m data=text data.path=books

It takes the settings of launch/train.py. Training does the same at its start where tokens are missing; do it
before for a large corpus, which ranks on expensive devices would wait for. Stopped at any moment, the same command goes
on. Over several machines, and one step behind them:

    python launch/prepare.py +exp=qwen3_1m data=jsonl data.path=corpus shard=0/8      on the first of eight, and so on
    python launch/prepare.py +exp=qwen3_1m data=jsonl data.path=corpus merge=true

`export=FOLDER` writes the tokens for Megatron too. `preview=3` shows the first documents as the model will see them, with
what is learned of them, and prepares nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled and from any folder


def main() -> None:
    """Compose, make the stores, say how their tokens fill the rows."""
    from stack.dist.failure import clear_errors

    with clear_errors():
        from stack.config.compose import from_command_line
        from stack.data.command import prepare, take_command

        command, settings = take_command(sys.argv[1:])
        cfg = from_command_line(settings, only=("data", "model"))
        if cfg is None:
            return
        stores = prepare(cfg, command)
        if stores:
            from stack.data.loader import EvalLoader, Loader  # brings torch, which tokens do without

            loader = Loader(stores, cfg.data, dp=1, dp_rank=0, accumulation=1, seed=cfg.seed)
            held_out = EvalLoader(stores, cfg.data, dp=1, dp_rank=0, max_rows=cfg.log.eval_rows)
            print(*loader.describe(), held_out.describe(), sep="\n")


if __name__ == "__main__":
    main()
