"""Contradictions between the model, its positions, its attention kernel and its tokens; a part of
`checks.py`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from stack.config import derive
from stack.config.chat_checks import is_supervised
from stack.config.data_checks import WITHOUT_TEXT, sources_of
from stack.config.schema import RunConfig
from stack.errors import Fault

ATTENTION = ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Attention kernels by name; `owner/kernel` names one on the hub."""

KEEPS_SCORES = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Those of which torch has operators that hand out the log-sum-exp: a lean layer keeps it, and runs their forward once."""

SMALLEST_VOCABULARY = 257
"""Tokens of a byte-level BPE without a single merge: 256 bytes and the end of text."""


def model_faults(cfg: RunConfig, device: str | None) -> Iterator[Fault]:
    """device: "cpu", "cuda" or None where it is not known yet."""
    yield from _source(cfg)
    yield from _positions(cfg)
    yield from _attention(cfg, device)
    yield from _tokens(cfg)


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


def _positions(cfg: RunConfig) -> Iterator[Fault]:
    model, rope, seq_len = cfg.model, cfg.model.rope, cfg.data.seq_len
    stretched = rope.scaling not in ("none", "checkpoint")
    if rope.factor is not None and not stretched:
        want = f"no factor, since model.rope.scaling={rope.scaling} takes none"
        fix = "model.rope.scaling=yarn, or model.rope.factor=null"
        yield Fault("model.rope.factor", rope.factor, want, fix)
    theta = derive.rope_parameters(derive.architecture(model)).get("rope_theta")
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


def _tokens(cfg: RunConfig) -> Iterator[Fault]:
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
        if not model.path and room and data.vocab_size > room:
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
