"""Prepare the tokens of a run ahead of it, in one process, without a device:

    python launch/prepare.py +exp=quickstart
    python launch/prepare.py +exp=qwen3_1m data=text data.path=books

It takes the settings of launch/train.py. Training does the same at its start where tokens are missing; do it
before for a large corpus, which ranks on expensive devices would wait for.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled and from any folder


def main() -> None:
    """Compose, make the store, say how its tokens fill the rows."""
    from stack.dist.failure import clear_errors

    with clear_errors():
        from stack.config.compose import from_command_line
        from stack.config.derive import architecture

        cfg = from_command_line(sys.argv[1:], only=("data", "model"))
        if cfg is None:
            return
        from stack.data.loader import EvalLoader, Loader
        from stack.data.prepare import ensure_store
        from stack.data.store import TokenStore

        folder = ensure_store(
            cfg.data,
            tokenizer_path=cfg.model.tokenizer or cfg.model.path,
            model_vocab=architecture(cfg.model).get("vocab_size"),
            seed=cfg.seed,
        )
        store = TokenStore(folder)
        loader = Loader(store, cfg.data, dp=1, dp_rank=0, accumulation=1, seed=cfg.seed)
        held_out = EvalLoader(store, cfg.data, dp=1, dp_rank=0, max_rows=cfg.log.eval_rows)
        print(f"training: {loader.account}\n{held_out.describe()}")


if __name__ == "__main__":
    main()
