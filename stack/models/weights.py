"""From the names in a safetensors folder to the parameters of a model, judged by headers, read one module at a time.

transformers 5 keeps some parameters in another form than published checkpoints do (Qwen3-MoE's experts are stacked in
one tensor, 384 tensors a layer in the file). Its own conversion rules are applied here to one parameter at a time; the
same rules run on empty tensors first, so that every missing, unexpected or mis-shaped name is known before reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from stack.errors import ModelError
from stack.models.safetensors_file import Entry

_SHOWN = 50
_READ, _LIKE = methodcaller("read"), methodcaller("like")
"""Of an Entry, or of a kind of its own, such as a parameter in a checkpoint."""


@dataclass
class Source:
    """Tensors of the folder that one conversion turns into one or more parameters."""

    target: str
    converter: WeightConverter | None
    parts: list[tuple[str, str, Entry]] = field(default_factory=list)
    """(pattern that matched, name in the folder, tensor) in the order of expert numbers."""

    def values(self, model: PreTrainedModel, read: Callable[[Entry], Tensor]) -> dict[str, Tensor]:
        """Parameter name -> value. `read` is _READ, or _LIKE for the shapes alone."""
        if self.converter is None:
            return {self.target: read(self.parts[0][2])}
        converter = deepcopy(self.converter)
        for pattern, name, entry in self.parts:
            converter.add_tensor(self.target, name, pattern, _reader(read, entry))
        try:
            found = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:  # tensors that do not fit together
            raise ModelError(
                f"{self.target} cannot be put together from {len(self.parts)} tensors ({self.parts[0][1]} ...): {error}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def _reader(read: Callable[[Entry], Tensor], entry: Entry) -> Any:
    # The converter calls it when it needs the tensor, one after the other.
    return lambda: read(entry)


@dataclass
class WeightPlan:
    """Where each parameter's value comes from."""

    sources: dict[str, tuple[Source, str]]
    """Parameter name -> (source, name of the value in it); tied parameters under the name of their first."""
    doubles: list[tuple[str, Source, Source]]
    """Tied parameters that the folder holds twice: equal or a fault."""

    def value(self, model: PreTrainedModel, name: str) -> Tensor:
        """The value of parameter `name` in the folder's type."""
        source, key = self.sources[name]
        return source.values(model, _READ)[key]

    def check_doubles(self, model: PreTrainedModel) -> None:
        """Raise ModelError where a tied head differs from its embedding: training would drop one of them."""
        for name, first, second in self.doubles:
            one = first.values(model, _READ)[first.target]
            if not torch.equal(one, second.values(model, _READ)[second.target]):
                raise ModelError(
                    f"{second.target} and {name} differ in the weights, but the model's config ties them "
                    "(tie_word_embeddings=true). Fix: set tie_word_embeddings to false, in the model's config.json or by "
                    "model.architecture.tie_word_embeddings=false"
                )


def plan_weights(model: PreTrainedModel, entries: dict[str, Entry], folder: str) -> WeightPlan:
    """Match a folder's tensors with the model's parameters (meta device will do).

    Raises one ModelError that lists every missing, unexpected and mis-shaped name.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    sources, unexpected = _match(model, entries, expected)
    faults: list[str] = []
    found: dict[str, tuple[Source, str]] = {}
    for source in sources.values():
        try:
            values = source.values(model, _LIKE)
        except ModelError as error:
            faults.append(f"incomplete: {error}")
            found[source.target] = (source, source.target)
            continue
        for name, value in values.items():
            found[name] = (source, name)
            if name not in expected:
                unexpected.append(name)
            elif tuple(value.shape) != expected[name]:
                there, here = list(value.shape), list(expected[name])
                of = f" (from {len(source.parts)} tensors)" if source.converter else ""
                faults.append(f"mis-shaped: {name} is {there} in the folder{of} and {here} in the model")
    doubles = _merge_tied(model, found)
    faults += [f"missing: {name}" for name in expected if name not in found and name not in _tied(model)]
    faults += [f"unexpected: {name}" for name in unexpected if not _ignored(model, name)]
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise ModelError(
            f"the weights in {folder} do not fit its config ({type(model).__name__}):\n  - "
            + "\n  - ".join(faults[:_SHOWN] + more)
            + "\nFix: use the config.json that belongs to the weights"
        )
    return WeightPlan(found, doubles)


def _match(
    model: PreTrainedModel, entries: dict[str, Entry], expected: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Source], list[str]]:
    """Group the folder's tensors by the parameter they make up; the rest are unexpected."""
    transforms: list[WeightTransform] = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(expected, True)
    sources: dict[str, Source] = {}
    unexpected: list[str] = []
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in expected:
            # A folder written in transformers' own form has names that must not be converted again.
            plain, _ = rename_source_key(name, [], [], prefix, known)
            target, pattern = (plain, None) if plain in expected else (target, pattern)
        if target not in expected:
            unexpected.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        source = sources.setdefault(target, Source(target, converter))
        source.parts.append((pattern or name, name, entries[name]))
        if source.converter is None and len(source.parts) > 1:
            unexpected.append(f"{name} (also {source.parts[0][1]})")
    return sources, unexpected


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Second name of a tied parameter -> its first."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def _merge_tied(
    model: PreTrainedModel, found: dict[str, tuple[Source, str]]
) -> list[tuple[str, Source, Source]]:
    """Bring a tied parameter under its first name, whichever the folder uses; returns those that are there twice."""
    doubles = []
    for second, first in _tied(model).items():
        if second not in found:
            continue
        if first in found:
            doubles.append((first, found[first][0], found[second][0]))
        else:
            found[first] = found[second]
        del found[second]
    return doubles


def _ignored(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers, too, skips this name: left-overs of older versions, such as stored rotary frequencies."""
    patterns = {*(model._keys_to_ignore_on_load_unexpected or []), r"rotary_emb\.inv_freq"}
    return any(re.search(pattern, name) for pattern in patterns)
