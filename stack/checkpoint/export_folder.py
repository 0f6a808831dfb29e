"""Which folder an export may replace: an earlier export, or an empty one. Whatever else lies there is not ours to delete."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from stack.errors import CheckpointError

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
NAMES = frozenset(
    (
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
        *("added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt"),
        *("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json"),
    )
)
"""Files beside the weights that an export writes; which of them, depends on the model and its tokenizer."""
FIX = (
    "Fix: move it away, or export to another folder (out=FOLDER of launch/export.py; at the end of a run nothing is exported "
    "with checkpoint.export=false)"
)


def check_replaceable(folder: Path, protected: Sequence[Path] = ()) -> None:
    """Raise CheckpointError unless `folder` is absent, empty, or holds an export and nothing else.

    protected: folders that are in use, never replaced, nor a folder that they lie in.
    """
    own = folder.resolve()
    for each in protected:
        if each.exists() and own in (each.resolve(), *each.resolve().parents):
            raise CheckpointError(
                f"{folder} is or holds {each}, which is in use: it is not overwritten. {FIX}"
            )
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: it is not overwritten. {FIX}")
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    foreign = [name for name in names if name not in NAMES and not WEIGHTS.fullmatch(name)]
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise CheckpointError(
            f"{folder} exists and holds what no export writes ({', '.join(foreign[:5])}{more}): it is not overwritten. {FIX}"
        )
    if names and not ("config.json" in names and any(map(WEIGHTS.fullmatch, names))):
        raise CheckpointError(
            f"{folder} exists and is no exported model (it holds {', '.join(names)}, not config.json with weights): it is "
            f"not overwritten. {FIX}"
        )
