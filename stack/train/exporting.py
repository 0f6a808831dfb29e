"""The Hugging Face side of a run: its tokenizer, what an export needs kept in the run's folder, and the export at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stack.checkpoint.export_folder import check_replaceable
from stack.checkpoint.export_hf import export_hf, keep_auxiliary
from stack.checkpoint.export_run import folders_in_use
from stack.config.chat_checks import is_supervised
from stack.config.schema import RunConfig
from stack.data.chat.template import adopt_template
from stack.data.store import TokenStore
from stack.data.tokenizer import load_tokenizer
from stack.dist.topology import Topology
from stack.models.build import DTYPES, BuiltModel
from stack.train.folder import RunFolder

if TYPE_CHECKING:
    from stack.engine.handle import Engine


def run_tokenizer(cfg: RunConfig, store: TokenStore) -> Any:
    """The tokenizer of the run's tokens, with the chat template they were rendered by; None if they were drawn."""
    # The store may have been made by a run that knew the same tokenizer by another path.
    path = store.trained_tokenizer or cfg.model.tokenizer or cfg.model.path
    if not store.tokenizer or not path:
        return None
    tokenizer = load_tokenizer(path)
    if is_supervised(cfg.data):
        adopt_template(tokenizer, cfg.data)
    return tokenizer


def keep_export_files(cfg: RunConfig, built: BuiltModel, store: TokenStore, folder: RunFolder) -> None:
    """Beside the checkpoints, so that `launch/export.py` needs the run's folder alone. Run it on one rank.

    Raises CheckpointError, also where the export at the end would find its place taken.
    """
    if cfg.checkpoint.export:
        check_replaceable(folder.model, folders_in_use(cfg, folder.path))
    if cfg.checkpoint.every or cfg.checkpoint.final:
        keep_auxiliary(built, folder.path, DTYPES[cfg.engine.precision], run_tokenizer(cfg, store))


def export_at_end(
    cfg: RunConfig,
    engine: Engine,
    built: BuiltModel,
    store: TokenStore,
    folder: RunFolder,
    topology: Topology,
) -> None:
    """Collective."""
    tokenizer = run_tokenizer(cfg, store) if topology.is_main else None
    dtype = DTYPES[cfg.engine.precision]
    export_hf(
        built,
        engine.named_full_parameters(),
        folder.model,
        dtype,
        tokenizer,
        topology.is_main,
        protected=folders_in_use(cfg, folder.path),
    )
