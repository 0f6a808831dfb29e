"""What the steps are fed with: the token stores, and this rank's training and held-out rows."""

from __future__ import annotations

from functools import partial
from typing import Any

from stack.checkpoint.state import TrainState
from stack.config import derive
from stack.config.schema import RunConfig
from stack.data.loader import EvalLoader, Loader
from stack.data.mixture import Share, shares_of
from stack.data.prepare import ensure_stores
from stack.data.store import TokenStore
from stack.dist.agree import on_main_slowly
from stack.dist.topology import Topology
from stack.train.console import tell, tell_waiting


def open_stores(cfg: RunConfig, topology: Topology) -> list[Share]:
    """The tokens, prepared by rank 0 if they are not there: one store, or one for each part of `data.mixture`."""
    prepare = partial(
        ensure_stores,
        cfg.data,
        tokenizer_path=cfg.model.tokenizer or cfg.model.path,
        model_vocab=derive.architecture(cfg.model).get("vocab_size"),
        seed=cfg.seed,
        say=tell,
    )
    folders = on_main_slowly(topology, prepare, partial(tell_waiting, "preparing tokens"))
    return shares_of(cfg.data, [TokenStore(folder) for folder in folders])


def make_loader(cfg: RunConfig, stores: list[Share], topology: Topology) -> Loader:
    """Training rows of this rank."""
    loader = Loader(
        stores,
        cfg.data,
        accumulation=cfg.engine.accumulation,
        seed=cfg.seed,
        epochs=cfg.schedule.epochs,
        **_place(topology),
    )
    for line in loader.describe() if topology.is_main else ():
        tell(line)
    return loader


def make_eval_rows(cfg: RunConfig, stores: list[Share], topology: Topology) -> EvalLoader:
    """Held-out rows of this rank."""
    rows = EvalLoader(stores, cfg.data, max_rows=cfg.log.eval_rows, **_place(topology))
    if topology.is_main and cfg.log.eval_rows:
        tell(rows.describe())
    return rows


def _place(topology: Topology) -> dict[str, Any]:
    """Which rows, and which slice of them, this rank reads, and for what device."""
    return {
        "dp": topology.dp,
        "dp_rank": topology.dp_rank,
        "sp": topology.sp,
        "sp_rank": topology.sp_rank,
        "pin": topology.device if topology.device.type == "cuda" else None,
    }


class LoaderHook:
    """Adds `tokens_total/NAME` to the record for each part of a mixture: the tokens drawn from it so far. Stands before the
    hooks that keep and show numbers. Closing it ends the threads that read ahead."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def after_step(self, state: TrainState, record: dict[str, Any]) -> None:
        record.update(
            {f"tokens_total/{name}": tokens for name, tokens in self._loader.drawn_tokens().items()}
        )

    def close(self) -> None:
        self._loader.close()
