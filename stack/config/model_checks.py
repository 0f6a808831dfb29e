"""Contradictions between the model, its positions, its attention kernel and its tokens; a part of
`checks.py`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from stack.config import derive
from stack.config.chat_checks import is_supervised
from stack.config.data_checks import WITHOUT_TEXT, sources_of
from stack.config.ranges import Range
from stack.config.schema import ModelConfig, RunConfig
from stack.errors import Fault

ATTENTION = ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Attention kernels by name; `owner/kernel` names one on the hub."""

KEEPS_SCORES = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Those of which torch has operators that hand out the log-sum-exp: a lean layer keeps it, and runs their forward once."""

SMALLEST_VOCABULARY = 257
"""Tokens of a byte-level BPE without a single merge: 256 bytes and the end of text."""


def is_count(value: object) -> TypeGuard[int]:
    """A whole number above 0; true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object, least: float) -> bool:
    """Finite, `least` or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < math.inf


COUNT = Range(is_count, "a whole number above 0")
COUNT_OR_NULL = Range(lambda value: value is None or is_count(value), "a whole number above 0, or null")
COUNTS = Range(
    lambda value: is_count(value) or (isinstance(value, list) and bool(value) and all(map(is_count, value))),
    "a whole number above 0, or a list of them",
)
SECTION = Range(lambda value: value is None or isinstance(value, dict), "a section of settings, or null")
BASE = Range(
    lambda value: (
        value is None or all(_is_number(one, 1) for one in (value if isinstance(value, list) else [value]))
    ),
    "a number of at least 1, or a list of them, or null",
)

FIELDS: dict[str, tuple[Range, object]] = {
    "num_attention_heads": (COUNT, 32),
    "num_key_value_heads": (COUNT_OR_NULL, 8),
    "num_hidden_layers": (COUNT, 36),
    "hidden_size": (COUNT, 4096),
    "intermediate_size": (COUNTS, 12288),
    "vocab_size": (COUNT, 151936),
    "max_position_embeddings": (COUNT, 40960),
    "head_dim": (COUNT_OR_NULL, 128),
    "rope_theta": (BASE, 1000000),
    "rope_scaling": (SECTION, "{rope_type:yarn,factor:4}"),
    "rope_parameters": (SECTION, "{rope_type:yarn,factor:4}"),
}
"""Fields of a Hugging Face config that are read before the model is built -> their range where given, and an example."""

ROPE_FIELDS: dict[str, tuple[Range, object]] = {
    "factor": (Range(lambda value: _is_number(value, 1), "a number of at least 1"), 4),
    "original_max_position_embeddings": (
        Range(lambda value: value is None or _is_number(value, 1), "a number of at least 1, or null"),
        32768,
    ),
    "rope_theta": (BASE, 1000000),
}
"""Of a rotary section, or of one in it for a kind of layer."""

WITHOUT_FACTOR = ("default", "yarn", "longrope", "su", "proportional")
"""Kinds of rotary embedding whose factor may be null: transformers then takes it from the lengths, or needs none."""

WITHOUT_WIDTH = ("gpt_neo", "rwkv", "zamba2")
"""`model_type`s whose `intermediate_size` may be null: transformers then takes a multiple of the hidden size."""


def architecture_faults(model: ModelConfig) -> Iterator[Fault]:
    """Fields of the model's config that cannot be what they say. While there are any, no check may read them."""
    fields = derive.architecture(model)
    for name, (allowed, example) in FIELDS.items():
        if name not in fields or allowed.holds(fields[name]):
            continue
        if name == "intermediate_size" and fields[name] is None and fields.get("model_type") in WITHOUT_WIDTH:
            continue
        yield field_fault(model, name, fields[name], allowed.want, example)
    for section in ("rope_scaling", "rope_parameters"):
        yield from _rope_faults(model, section, fields.get(section))
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if is_count(heads) and is_count(kv_heads) and heads % kv_heads:
        want = f"a divisor of the {heads} attention heads, which share them equally"
        near = max(number for number in range(1, min(heads, kv_heads) + 1) if heads % number == 0)
        yield field_fault(model, "num_key_value_heads", kv_heads, want, near)


def _rope_faults(model: ModelConfig, section: str, rope: Any) -> Iterator[Fault]:
    if not isinstance(rope, dict):
        return
    kind = rope.get("rope_type") or rope.get("type") or "default"
    for name, (allowed, example) in ROPE_FIELDS.items():
        value = rope.get(name)
        free = value is None and (name not in rope or (name == "factor" and kind in WITHOUT_FACTOR))
        if not free and not allowed.holds(value):
            yield field_fault(model, f"{section}.{name}", value, allowed.want, example)
    for layers, part in rope.items():
        yield from _rope_faults(model, f"{section}.{layers}", part)


def field_fault(model: ModelConfig, name: str, got: object, want: str, example: object) -> Fault:
    """Of a field of the model's config, wherever that came from."""
    if derive.architecture(model) is model.architecture:
        key = f"model.architecture.{name}"
        return Fault(key, got, want, f"e.g. {key}={example}")
    whose = f"a config.json whose {name} is {want}, not {got!r}"
    return Fault("model.path", model.path, whose, f"mend the file, e.g. {name}: {example}")


def model_faults(cfg: RunConfig, device: str | None, sound: bool) -> Iterator[Fault]:
    """device: "cpu", "cuda" or None where it is not known yet. sound: there are no `architecture_faults`."""
    yield from _source(cfg)
    yield from _positions(cfg, sound)
    yield from _attention(cfg, device)
    yield from _tokens(cfg, sound)


def _source(cfg: RunConfig) -> Iterator[Fault]:
    model, path = cfg.model, cfg.model.path
    if path is not None and not path.strip():
        yield Fault("model.path", path, "a model folder or hub name", "model.path=FOLDER, or null")
    elif path is None and model.init == "pretrained":
        want = "a model folder or hub name to take the weights from (model.init=pretrained)"
        fix = "model.path=FOLDER, or model.init=scratch with model.architecture"
        yield Fault("model.path", path, want, fix)
    elif path is None and not model.architecture.get("model_type"):
        want = "the Hugging Face config of the model, with its model_type, or model.path"
        fix = "choose a ready one, e.g. model=tiny, or give model.path=FOLDER"
        yield Fault("model.architecture", model.architecture, want, fix)
    elif path is not None and re.match(r"[./~]", path) and not _has_config(path):
        fix = "check the path, or give a hub name"
        yield Fault("model.path", path, "a model folder with a config.json", fix)
    if any(not pattern.strip("*") for pattern in model.freeze):
        fix = "name the parts, e.g. model.freeze=['*embed_tokens*']"
        yield Fault("model.freeze", model.freeze, "patterns that leave something to train", fix)


def _has_config(path: str) -> bool:
    return (Path(path).expanduser() / "config.json").is_file()


def _positions(cfg: RunConfig, sound: bool) -> Iterator[Fault]:
    model, rope, seq_len = cfg.model, cfg.model.rope, cfg.data.seq_len
    stretched = rope.scaling not in ("none", "checkpoint")
    if rope.factor is not None and not stretched:
        want = f"no factor, since model.rope.scaling={rope.scaling} takes none"
        fix = "model.rope.scaling=yarn, or model.rope.factor=null"
        yield Fault("model.rope.factor", rope.factor, want, fix)
    if not sound:
        return
    theta = derive.rope_parameters(derive.architecture(model)).get("rope_theta")
    theta = None if isinstance(theta, list) else theta  # a list has one for each layer
    if rope.theta and theta and model.init == "pretrained" and not math.isclose(rope.theta, theta):
        want = f"the base that the weights were trained with, {theta:g}"
        yield Fault("model.rope.theta", rope.theta, want, "model.rope.theta=null")
    original, reach = derive.original_length(model), derive.reach(model, seq_len)
    if original is None or reach is None or original < 1 or seq_len <= reach:
        return
    if rope.factor is not None and stretched:
        need = math.ceil(seq_len / original)
        want = f"at least {need}, to stretch {original} positions over data.seq_len={seq_len}"
        fix = f"model.rope.factor={need}, or null to have it worked out"
        yield Fault("model.rope.factor", rope.factor, want, fix)
    elif model.init == "scratch":
        want = f"at most the {reach} positions of the model's config"
        fix = f"model.architecture.max_position_embeddings={seq_len}"
        if model.path is not None:  # its folder's config wins over the architecture named here
            fix = f"model.rope.scaling=yarn, or data.seq_len={reach}"
        yield Fault("data.seq_len", seq_len, want, fix)
    else:
        want = f"a way to reach data.seq_len={seq_len} from the {reach} positions that the model covers"
        fix = f"model.rope.scaling=yarn, or data.seq_len={reach}"
        yield Fault("model.rope.scaling", rope.scaling, want, fix)


def _attention(cfg: RunConfig, device: str | None) -> Iterator[Fault]:
    name, key = cfg.model.attention, "model.attention"
    from_hub = re.fullmatch(r"[\w.-]+/[\w.@:-]+", name) is not None
    if name not in ATTENTION and not from_hub:
        want = f"one of {', '.join(ATTENTION)} or a hub kernel such as kernels-community/flash-attn2"
        if name == "eager":
            want += "; eager builds a mask that grows with the square of the length"
        near = (difflib.get_close_matches(name, ATTENTION, n=1) or ["sdpa"])[0]
        yield Fault(key, name, want, f"{key}={near}")
        return
    if device == "cpu" and name == "flex_attention":
        want = "a kernel with a backward on the CPU, which flex_attention lacks"
        yield Fault(key, name, want, f"{key}=sdpa")
    elif device == "cpu" and name != "sdpa":
        yield Fault(key, name, "a kernel for the CPU; this one needs a GPU", f"{key}=sdpa")
    if cfg.engine.precision == "fp32" and (from_hub or name.startswith("flash")):
        want = "a kernel for engine.precision=fp32; flash kernels take 16 bits only"
        yield Fault(key, name, want, f"{key}=sdpa, or engine.precision=bf16")


def _tokens(cfg: RunConfig, sound: bool) -> Iterator[Fault]:
    model, data, key = cfg.model, cfg.data, "data.train_tokenizer"
    if data.train_tokenizer:
        if data.source in WITHOUT_TEXT:
            yield Fault(key, True, f"false with data.source={data.source}, which has no text", f"{key}=false")
        if model.init != "scratch":
            want = "false with model.init=pretrained, whose weights know their own tokens only"
            yield Fault(key, True, want, f"{key}=false, or model.init=scratch")
        if model.tokenizer is not None:
            want = f"false beside model.tokenizer={model.tokenizer}: one of the two gives the tokens"
            yield Fault(key, True, want, f"{key}=false, or model.tokenizer=null")
        room = model.architecture.get("vocab_size")
        if sound and not model.path and room and data.vocab_size > room:
            want = f"at most {room}, the vocabulary of the model"
            fix = f"data.vocab_size={room}, or model.architecture.vocab_size={data.vocab_size}"
            yield Fault("data.vocab_size", data.vocab_size, want, fix)
        if data.vocab_size < SMALLEST_VOCABULARY:
            want = f"at least {SMALLEST_VOCABULARY}: the 256 bytes and the end of text"
            yield Fault("data.vocab_size", data.vocab_size, want, "data.vocab_size=4096")
    elif sources_of(data) - WITHOUT_TEXT and model.tokenizer is None and model.path is None:
        want = "a tokenizer: there is no model.path to take one from, and none is trained"
        fix = "model.tokenizer=FOLDER" + ("" if is_supervised(data) else ", or data.train_tokenizer=true")
        yield Fault("model.tokenizer", None, want, fix)
    if "random" in sources_of(data) and not model.path and not model.architecture.get("vocab_size"):
        key = "model.architecture.vocab_size"
        yield Fault(key, None, "the vocabulary that random tokens are drawn from", f"{key}=4096")
