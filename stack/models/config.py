"""From `model` settings to a Hugging Face config: from the folder of `path`, or from `architecture`."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from stack.config.schema import ModelConfig
from stack.errors import ConfigError, Fault, ModelError
from stack.models.hub import fetch, is_folder

_ALSO_READ = {
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "torch_dtype",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}
"""Fields of published configs that are read though a config class may not declare them."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A Hugging Face config and where it came from."""

    config: PretrainedConfig
    raw: dict[str, Any]
    """The config as it was published, without class defaults."""
    folder: Path | None
    """Folder with weights, tokenizer and generation config; None without."""
    notes: tuple[str, ...] = ()
    """What differs from the settings, for the log."""


def read_architecture(cfg: ModelConfig, fetch_weights: bool = False) -> Architecture:
    """The config that the model is built from.

    A folder's own config wins over `architecture`. A hub name's does for `pretrained`, downloaded if need be (with the
    weights if `fetch_weights`); for `scratch` it is asked only where `architecture` is empty. Raises ConfigError or
    ModelError.
    """
    if cfg.init == "pretrained" and cfg.path is None:
        fault = Fault(
            "model.path",
            None,
            "a folder or hub name, to load weights from",
            "set model.path, or model.init=scratch",
        )
        raise ConfigError([fault])
    if cfg.path is None and not cfg.architecture:
        fault = Fault(
            "model.architecture",
            {},
            "the fields of a Hugging Face config",
            "choose a ready model=..., or set model.path",
        )
        raise ConfigError([fault])
    if cfg.path is not None and (cfg.init == "pretrained" or not cfg.architecture or is_folder(cfg.path)):
        folder = fetch(cfg.path, weights=fetch_weights and cfg.init == "pretrained")
        raw = _read_json(folder / "config.json")
        config = _from_folder(folder, raw)
        return _checked(Architecture(config, raw, folder, _differences(cfg.architecture, config)))
    # Copies: transformers completes nested fields in place.
    return _checked(Architecture(_from_fields(cfg.architecture), copy.deepcopy(cfg.architecture), None))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} does not hold a config")
    return found


def _from_folder(folder: Path, raw: dict[str, Any]) -> PretrainedConfig:
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        extra = " (it brings its own code, which is not run here)" if "auto_map" in raw else ""
        raise ModelError(
            f"{folder}/config.json: model_type={model_type!r} is unknown to this transformers{extra}"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # many kinds, all of which mean a config that transformers cannot use
        raise ModelError(f"{folder}/config.json cannot be used: {type(error).__name__}: {error}") from error


def _from_fields(fields: dict[str, Any]) -> PretrainedConfig:
    fields = copy.deepcopy(fields)
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), n=1)
        want = f"a model type of transformers, such as {near[0] if near else 'qwen3'!r}"
        raise ConfigError([Fault("model.architecture.model_type", model_type, want, "correct the name")])
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | {
        *_ALSO_READ,
        *config_class.attribute_map,
    }
    faults = []
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            want = f"a field of {config_class.__name__}" + (f", such as {near[0]!r}" if near else "")
            faults.append(Fault(f"model.architecture.{name}", fields[name], want, "correct or remove it"))
    if faults:
        raise ConfigError(faults)
    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # as in _from_folder
        fault = Fault(
            "model.architecture", fields, f"fields that {config_class.__name__} accepts", f"{error}"
        )
        raise ConfigError([fault]) from error


def _differences(architecture: dict[str, Any], config: PretrainedConfig) -> tuple[str, ...]:
    found = [
        f"{name} {architecture[name]!r} -> {getattr(config, name, None)!r}"
        for name, value in architecture.items()
        # What is nested, or kept elsewhere by the config class, such as the rotary base, is judged where it is used.
        if isinstance(value, str | int | float) and getattr(config, name, value) != value
    ]
    return (f"the folder's config replaces model.architecture: {', '.join(found)}",) if found else ()


def _checked(found: Architecture) -> Architecture:
    config: Any = found.config
    where = found.folder or "model.architecture"
    decoder = not getattr(config, "is_encoder_decoder", False)
    if not decoder or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{where}: {config.model_type!r} is not a causal language model")
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{where}: the weights are quantised, which cannot be trained. Fix: take the unquantised model"
        )
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{where}: output_router_logits=true adds a load-balancing loss, which is not computed here. Fix: set it to false"
        )
    return found
