"""A model built so that no rank ever holds more of it than its shards and one module.

Parameters are born on the meta device, without memory; buffers are born real, so rotary frequencies are the fp32 numbers
of a model built plainly (on meta they would have to be made up afterwards; in bf16 they would be rounded). Then, module
by module, parameters get their values and the engine's `partition` takes them away into shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from stack.config.model_checks import ATTENTION
from stack.config.schema import ModelConfig
from stack.errors import ConfigError, Fault, ModelError
from stack.models.attention import PLAIN_BACKENDS
from stack.models.config import read_architecture
from stack.models.init import check_rule, draw, own_parameters
from stack.models.rope import RopeInfo, apply_rope
from stack.models.safetensors_file import Entry, read_headers
from stack.models.spec import ModelSpec, describe
from stack.models.weights import WeightPlan, plan_weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Type of the parameters by `engine.precision`."""


@dataclass(frozen=True)
class BuiltModel:
    """A plain transformers model and what is known of it."""

    model: PreTrainedModel
    spec: ModelSpec
    rope: RopeInfo
    folder: Path | None
    """Where config (and weights) came from; None if built from `architecture`."""
    shapes: dict[str, tuple[int, ...]]
    """Parameter name -> full shape, tied parameters once; stays true when the parameters are sharded."""
    buffers: dict[str, Tensor]
    """Copies of all buffers as built."""
    notes: tuple[str, ...]
    """What was decided beyond the settings, for the log."""


@dataclass(frozen=True)
class BlankModel:
    """A model judged sound, whose parameters have no values yet."""

    built: BuiltModel
    dtype: torch.dtype
    seed: int
    init: Literal["pretrained", "scratch"]
    weights: WeightPlan | None
    """Where this rank reads pretrained values; None if it does not."""


def build_model(
    cfg: ModelConfig,
    seq_len: int,
    dtype: torch.dtype,
    seed: int,
    partition: Callable[[nn.Module], None] | None = None,
    reads_weights: bool = True,
) -> BuiltModel:
    """`prepare_model` and `fill_model` in one, for one process. Ranks do well to agree between the two."""
    return fill_model(prepare_model(cfg, seq_len, dtype, seed, reads_weights), partition)


def prepare_model(
    cfg: ModelConfig,
    seq_len: int,
    dtype: torch.dtype,
    seed: int,
    reads_weights: bool = True,
    weights: Mapping[str, Entry] | None = None,
) -> BlankModel:
    """Everything that can fail: config, positions, structure, names and shapes of the weights. No rank waits in here.

    cfg: which model; seq_len: tokens of a row, for the positions; dtype: of the parameters. reads_weights: False for a
    rank whose pretrained values `partition` fills from another rank; it still checks the folder if it can see it. weights:
    where values come from in place of `cfg.path` or the seed, by name; empty on a rank that reads none.

    Raises ConfigError for settings, ModelError for a model or weights that cannot be used; nothing is silently adapted.
    """
    found = read_architecture(cfg, fetch_weights=reads_weights and weights is None)
    rope = apply_rope(found.config, cfg.rope, seq_len, cfg.init == "pretrained", found.raw)
    model = _on_meta(found.config, dtype)
    _refuse_trained_buffers(model)
    spec = describe(model)
    _refuse_other_kernels(model, spec, cfg.attention)
    _freeze(model, cfg.freeze)
    plan = None
    if weights is not None:
        if weights:
            plan = plan_weights(model, dict(weights), "checkpoint.weights_from")
            plan.check_doubles(model)
    elif cfg.init == "scratch":
        check_rule(model)
    elif reads_weights or _weights_visible(found.folder):
        assert found.folder is not None
        plan = plan_weights(model, read_headers(found.folder), str(found.folder))
        if reads_weights:
            plan.check_doubles(model)
    _take_generation_config(model, found.folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    notes = (*found.notes, rope.note) if rope.note else found.notes
    built = BuiltModel(model, spec, rope, found.folder, shapes, buffers, notes)
    init = cfg.init if weights is None else "pretrained"
    return BlankModel(built, dtype, seed, init, plan if reads_weights else None)


def fill_model(blank: BlankModel, partition: Callable[[nn.Module], None] | None = None) -> BuiltModel:
    """Give every parameter its value, one module after the other.

    partition: called for each module that holds parameters of its own, in order, as soon as they have values; it may
    take them away. A tied head is not announced: its parameter is the embedding's. Where this rank does not read
    pretrained weights, values are undefined until `partition` fills them.
    """
    model = blank.built.model
    holders = _holders(model)
    for name, module in list(model.named_modules()):
        # A tied head's parameter is no longer on meta: the embedding, which comes first, has filled it.
        blanks = {key: value for key, value in own_parameters(module).items() if value.is_meta}
        if not blanks:
            continue
        values = _values(blank, module, name, blanks)
        for key, before in blanks.items():
            after = nn.Parameter(values.pop(key).to(blank.dtype), requires_grad=before.requires_grad)
            for holder, attribute in holders[id(before)]:
                holder._parameters[attribute] = after
        if partition is not None:
            partition(module)
    check_positions(blank.built)
    return blank.built


def _values(
    blank: BlankModel, module: nn.Module, name: str, blanks: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    model = blank.built.model
    if blank.init == "scratch":
        return draw(model, module, name, blank.seed)
    if blank.weights is None:
        return {key: torch.empty(value.shape, dtype=blank.dtype) for key, value in blanks.items()}
    prefix = f"{name}." if name else ""
    return {key: blank.weights.value(model, prefix + key).to(blank.dtype) for key in blanks}


def _refuse_other_kernels(model: nn.Module, spec: ModelSpec, attention: str) -> None:
    """transformers hands soft caps and sinks to kernels that take them, and to others nothing, without a word. Which take
    sinks, the model's class says."""
    if not spec.attention_extras:
        return
    needs = f"this model's attention needs {', '.join(spec.attention_extras)}"
    known = getattr(model, "_compatible_flash_implementations", None) or []
    known = [name for name in known if "/" in name or name in ATTENTION]
    if "s_aux" in spec.attention_extras and attention not in known:
        want = f"one of {', '.join(known) or 'no kernel that can be named here'}: {needs}"
        fix = f"model.attention={known[0]} on a GPU" if known else "another model"
        raise ConfigError([Fault("model.attention", attention, want, fix)])
    if attention in PLAIN_BACKENDS:
        fix = "model.attention=flash_attention_2 on a GPU"
        raise ConfigError([Fault("model.attention", attention, f"a flash kernel: {needs}", fix)])


def _on_meta(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"transformers cannot build a {config.model_type} from this config: {error}"
        ) from error
    # Moving a parameter to meta makes a new one, which undoes the tie.
    model.tie_weights()
    return model


def _refuse_trained_buffers(model: PreTrainedModel) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    extra = [name for name in model.state_dict() if name not in parameters]
    if extra:
        raise ModelError(
            f"{type(model).__name__} keeps weights in buffers ({', '.join(extra[:3])}), which an optimizer does not see: "
            "not supported"
        )


def _weights_visible(folder: Path | None) -> bool:
    return folder is not None and any(folder.glob("*.safetensors"))


def _freeze(model: PreTrainedModel, patterns: list[str]) -> None:
    """Mark parameters that keep their values. Raises ConfigError for a pattern without a match, or nothing left."""
    names = dict(model.named_parameters(remove_duplicate=False))
    faults = []
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            want = "shell patterns that match parameter names such as " + ", ".join(list(names)[:3])
            faults.append(Fault("model.freeze", pattern, want, "correct or remove the pattern"))
        for name in matches:
            names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        faults.append(
            Fault(
                "model.freeze", patterns, "patterns that leave something to train", "freeze fewer parameters"
            )
        )
    if faults:
        raise ConfigError(faults)


def _holders(model: PreTrainedModel) -> dict[int, list[tuple[nn.Module, str]]]:
    """For each parameter, by id, the places where it is kept: two for a tied one."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in own_parameters(module).items():
            found.setdefault(id(parameter), []).append((module, key))
    return found


def _take_generation_config(model: PreTrainedModel, folder: Path | None) -> None:
    if folder is not None and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def check_positions(built: BuiltModel) -> None:
    """Raise ModelError unless every buffer is what it was when the model was built, in value and type.

    To be called again on every rank when the engine stands and after a resume: a rotary frequency that was rounded to
    bf16 on the way makes long texts slightly wrong without any other sign.
    """
    for name, buffer in built.model.named_buffers():
        before = built.buffers.get(name)
        if before is None or buffer.dtype != before.dtype or not torch.equal(buffer.detach().cpu(), before):
            raise ModelError(f"buffer {name} is no longer what the model was built with ({buffer.dtype})")
    for name, module in built.model.named_modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind != built.rope.kind:
            raise ModelError(f"{name} was built for positions of kind {kind!r}, not {built.rope.kind!r}")
