"""The trained model as a Hugging Face folder: safetensors, config with the positions used, tokenizer, generation config.

Parameters arrive one at a time and leave in shards, so memory is bounded by one shard. The folder is written under
another name and renamed last: it is complete or absent.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from stack.checkpoint.export_folder import check_replaceable
from stack.checkpoint.publish import remove_tree
from stack.errors import CheckpointError
from stack.models.build import BuiltModel

AUXILIARY = "hf_files"
"""Folder in a run's folder: all that an export holds beside weights."""
GENERATION = "generation_config.json"
SHARD_BYTES = 4 * 2**30
"""Bytes of one safetensors file, unless a single parameter is larger."""


def export_hf(
    built: BuiltModel,
    parameters: Iterable[tuple[str, Tensor | None]],
    folder: Path,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    writes: bool = True,
    shard_bytes: int = SHARD_BYTES,
    protected: Sequence[Path] = (),
) -> None:
    """Write `folder`, replacing an earlier export there and nothing else (`export_folder.py`).

    parameters: (name, whole tensor on the CPU), each parameter once, tied ones under their first name; None on ranks
    that do not write (`writes` False). The iterable is run to its end on every rank whatever happens, as gathering is
    collective. dtype: type in the files and in the config. protected: folders in use, besides the one that the model came
    from.

    Raises CheckpointError on the writing rank, with nothing left behind; ranks have to agree on the outcome afterwards.
    """
    if not writes:
        for _ in parameters:
            pass
        return
    part = folder.parent / f".{folder.name}.partial"
    remaining = iter(parameters)
    try:
        check_replaceable(folder, [*protected, *([built.folder] if built.folder else [])])
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _write_weights(built, remaining, part, dtype, shard_bytes)
        write_auxiliary(built, part, dtype, tokenizer)
        _sync(part)
        _put_in_place(part, folder)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        raise CheckpointError(f"the export to {folder} failed: {type(error).__name__}: {error}") from error
    finally:
        # The other ranks go on gathering until the last parameter.
        for _ in remaining:
            pass


def _write_weights(
    built: BuiltModel,
    parameters: Iterator[tuple[str, Tensor | None]],
    part: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    shards = _Shards(part, shard_bytes)
    expected = dict(built.shapes)
    reverts = _can_revert(built.model)
    for name, tensor in parameters:
        shape = expected.pop(name, None)
        if shape is None or tensor is None or tuple(tensor.shape) != shape:
            got = None if tensor is None else list(tensor.shape)
            raise CheckpointError(
                f"export: {name} came with shape {got}, the model has {shape and list(shape)}"
            )
        tensor = tensor.detach().to(dtype)
        published = revert_weight_conversion(built.model, {name: tensor}) if reverts else {name: tensor}
        for key, value in published.items():
            shards.add(key, value)
    if expected:
        raise CheckpointError(
            f"export: {len(expected)} parameters did not come: {', '.join(list(expected)[:5])}"
        )
    shards.finish()


def _can_revert(model: PreTrainedModel) -> bool:
    """Whether each parameter alone can be brought into the form of published checkpoints, which servers read.

    transformers 5 stacks a layer's experts; published files have them apart. Where a published tensor needs several
    parameters, transformers' own names are kept: it reads both.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return bool(conversions) and not any(
        isinstance(each, WeightConverter) and len(each.target_patterns) > 1 for each in conversions
    )


class _Shards:
    """Collects tensors up to the size of a file, writes it, and knows in the end which tensor is where."""

    def __init__(self, folder: Path, limit_bytes: int):
        self._folder, self._limit_bytes = folder, limit_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._names: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit_bytes:
            self._flush()
        # safetensors refuses views of one memory, which experts split from a stack are.
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == size
        self._pending[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        file = self._folder / self._part_name(len(self._names))
        save_file(self._pending, file, metadata={"format": "pt"})
        # safetensors 0.8 lets nobody else read it, while a server may well run as another user.
        file.chmod(self._folder.stat().st_mode & 0o666)
        self._names.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    @staticmethod
    def _part_name(index: int) -> str:
        return f"part-{index}.safetensors"

    def finish(self) -> None:
        """Write the rest and give the files their final names, which hold their number."""
        if self._pending:
            self._flush()
        count = len(self._names)
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._names):
            final = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / self._part_name(index)).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index_file = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(
                json.dumps(index_file, indent=2) + "\n"
            )


def write_auxiliary(
    built: BuiltModel, part: Path, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """All that stands beside the weights: config, generation config, tokenizer. part: a folder that exists."""
    _write_config(built, part, dtype, tokenizer)
    if tokenizer is not None:
        tokenizer.save_pretrained(part)


def keep_auxiliary(
    built: BuiltModel, run: Path, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Put what an export needs beside weights into the run's folder, in place of an earlier start's.

    Raises CheckpointError where the disk does not take it."""
    part, folder = run / f".{AUXILIARY}.partial", run / AUXILIARY
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write_auxiliary(built, part, dtype, tokenizer)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error}. Fix: free some space or mend the permissions, or set `out` to a folder "
            "that can be written"
        ) from error


def _write_config(
    built: BuiltModel, part: Path, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    config: Any = copy.deepcopy(built.model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(built.model).__name__]
    eos = getattr(tokenizer, "eos_token_id", None)
    if config.eos_token_id is None:
        config.eos_token_id = eos
    config.save_pretrained(part)
    _add_old_rope_fields(part / "config.json")
    published = None if built.folder is None else built.folder / GENERATION
    if published is not None and published.is_file():
        # As it is: some published ones do not pass the checks that saving makes.
        shutil.copyfile(published, part / GENERATION)
        return
    generation = copy.deepcopy(built.model.generation_config) or GenerationConfig()
    if generation.eos_token_id is None:
        generation.eos_token_id = config.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = getattr(tokenizer, "pad_token_id", None)
    generation.save_pretrained(part)


def _add_old_rope_fields(file: Path) -> None:
    """Readers from before transformers 5 look for rope_theta and rope_scaling, and take 10000 and no scaling if these
    are not there. transformers 5 reads rope_parameters and finds the same numbers."""
    config = json.loads(file.read_text())
    params = config.get("rope_parameters") or {}
    if "rope_theta" in params:
        config["rope_theta"] = params["rope_theta"]
        if params.get("rope_type", "default") != "default":
            config["rope_scaling"] = {key: value for key, value in params.items() if key != "rope_theta"}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _sync(folder: Path) -> None:
    """Have the disk hold every file before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _put_in_place(part: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.parent / f".{folder.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        part.rename(folder)
        remove_tree(old)
    else:
        part.rename(folder)
