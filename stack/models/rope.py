"""Rotary positions beyond the length that a model was trained on.

`apply_rope` writes the scaling into the Hugging Face config BEFORE the model is built: the rotary module computes its
frequencies once, in its constructor, and editing the config afterwards changes nothing. What it writes is also what a
server reads from the exported config. The conventions there, the same in transformers and vLLM:

| rope_type | reads | covers | max_position_embeddings |
| --- | --- | --- | --- |
| default | theta | max_position_embeddings | length covered |
| linear, dynamic | theta, factor | factor x max_position_embeddings | length before scaling |
| yarn | theta, factor, original_max_position_embeddings | factor x original | length covered |
| llama3, longrope | their own fields | max_position_embeddings | length covered |

Two kinds of scaling look at the longest position of the batch at hand, which differs between ranks that hold different
parts of a row and between a packed row and the same document alone. Here they are fixed at the row's length once:
`dynamic` becomes a plain rotary embedding with the larger base it would reach there (NTK-aware scaling), `longrope`
uses its long factors throughout. Both are exported in this form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig

from stack.config.schema import RopeConfig
from stack.errors import ConfigError, Fault


@dataclass(frozen=True)
class RopeInfo:
    """The positions that a model was built with."""

    kind: str
    """`rope_type` of the config; `none` for a model without rotary embedding."""
    theta: float | None
    factor: float
    original_length: int
    """Tokens covered without scaling."""
    max_length: int
    """Tokens covered with it."""
    note: str = ""
    """What was decided beyond the settings, for the log."""


@dataclass
class _State:
    """A config's positions, taken apart."""

    params: dict[str, Any] = field(default_factory=dict)
    kind: str = "none"
    nested: bool = False
    factor: float = 1.0
    original: int = 0
    covered: int = 0


def whole_factor(seq_len: int, original_length: int) -> float:
    """The smallest whole factor by which `original_length` covers `seq_len`."""
    return float(max(1, math.ceil(seq_len / original_length)))


def apply_rope(
    config: PretrainedConfig, rope: RopeConfig, seq_len: int, pretrained: bool, raw: dict[str, Any]
) -> RopeInfo:
    """Write the positions into `config` (in place) and return them.

    raw: the config as it was published, to tell a value that is given from a class default. Raises ConfigError with
    every fault: a length beyond the range, a factor below need, a base other than the checkpoint's, a setting without
    effect.
    """
    state = _read_state(config, raw)
    faults = _theta_faults(state, rope, pretrained, raw)
    if rope.scaling in ("checkpoint", "none"):
        faults += _unscaled_faults(state, rope, seq_len)
    else:
        faults += _scaled_faults(state, rope, seq_len)
    if faults:
        raise ConfigError(faults)
    if rope.theta is not None:
        state.params["rope_theta"] = float(rope.theta)
    if rope.scaling == "checkpoint":
        return _keep(config, state, seq_len)
    if rope.scaling == "none":
        return _unscaled(config, state)
    original = rope.original_length or state.original
    if rope.factor is None and seq_len <= original:
        kept = _keep(config, state, seq_len)
        return replace(
            kept, note=f"{rope.scaling} is not needed: {seq_len} tokens fit the original {original}"
        )
    factor = float(rope.factor or whole_factor(seq_len, original))
    return _scale(config, state, rope.scaling, factor, original, seq_len)


def _read_state(config: PretrainedConfig, raw: dict[str, Any]) -> _State:
    params = getattr(config, "rope_parameters", None) or {}
    length = int(getattr(config, "max_position_embeddings", 0) or 0)
    if not params:
        return _State(original=length, covered=length)
    if config.nested_rope_parameter_keys(params):
        return _State(params=params, kind="per layer", nested=True, original=length, covered=length)
    kind, factor = params["rope_type"], float(params.get("factor") or 1.0)
    if kind == "yarn":
        # transformers fills in max_position_embeddings where the original length is left out.
        original = int(params["original_max_position_embeddings"])
        return _State(params, kind, False, factor, original, int(factor * original))
    if kind in ("linear", "dynamic"):
        return _State(params, kind, False, factor, length, int(factor * length))
    original = int(params.get("original_max_position_embeddings") or length)
    return _State(params, kind, False, factor, original, length)


def _theta_faults(state: _State, rope: RopeConfig, pretrained: bool, raw: dict[str, Any]) -> list[Fault]:
    published = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    given = raw.get("rope_theta", published.get("rope_theta"))
    if rope.theta is not None:
        if not state.params or state.nested:
            want = "null: this model has no single rotary base"
            return [Fault("model.rope.theta", rope.theta, want, "leave it out")]
        if pretrained and given is not None and float(given) != float(rope.theta):
            want = f"{given}, the base that the checkpoint was trained with"
            return [Fault("model.rope.theta", rope.theta, want, "leave it out: it comes from the checkpoint")]
        return []
    scaled = published.get("rope_type", published.get("type", "default")) != "default"
    if state.params and not state.nested and given is None and scaled:
        want = f"the rotary base: the config scales positions but has no rope_theta (its class would take {state.params['rope_theta']})"
        return [Fault("model.rope.theta", None, want, "set the base that the model was trained with")]
    return []


def _unscaled_faults(state: _State, rope: RopeConfig, seq_len: int) -> list[Fault]:
    faults = []
    if rope.factor is not None:
        want = f"null, as model.rope.scaling={rope.scaling} takes no factor"
        faults.append(
            Fault("model.rope.factor", rope.factor, want, "set model.rope.scaling=yarn, or leave it out")
        )
    limit = state.covered if rope.scaling == "checkpoint" else state.original
    if limit and seq_len > limit:
        want = f"at most {limit} tokens, what the model's positions ({state.kind}, model.rope.scaling={rope.scaling}) cover"
        fix = (
            "a shorter data.seq_len"
            if state.nested or not state.params
            else ("model.rope.scaling=yarn (the factor follows from data.seq_len), or a shorter data.seq_len")
        )
        faults.append(Fault("data.seq_len", seq_len, want, fix))
    return faults


def _scaled_faults(state: _State, rope: RopeConfig, seq_len: int) -> list[Fault]:
    if state.nested or not state.params:
        what = (
            "has positions of its own for each kind of layer" if state.nested else "has no rotary positions"
        )
        return [
            Fault(
                "model.rope.scaling",
                rope.scaling,
                f"checkpoint: this model {what}",
                "model.rope.scaling=checkpoint",
            )
        ]
    original = rope.original_length or state.original
    if original < 1:
        return [
            Fault(
                "model.rope.original_length",
                original,
                "at least 1 token",
                "leave it out: it comes from the checkpoint",
            )
        ]
    if rope.factor is None:
        return []
    need = seq_len / original
    if rope.factor < max(1.0, need):
        want = f"at least {max(1.0, need):g} for data.seq_len={seq_len} on an original length of {original}"
        return [
            Fault(
                "model.rope.factor",
                rope.factor,
                want,
                f"leave it out to get {whole_factor(seq_len, original):g}",
            )
        ]
    return []


def _keep(config: PretrainedConfig, state: _State, seq_len: int) -> RopeInfo:
    """The checkpoint's own positions, those that depend on the batch fixed at `seq_len`."""
    theta = None if state.nested else state.params.get("rope_theta")
    if state.kind == "dynamic" and seq_len > state.original:
        return _scale(config, state, "dynamic", state.factor, state.original, seq_len)
    note = ""
    if state.kind == "yarn":
        config.max_position_embeddings = state.covered
    if state.kind == "longrope" and seq_len > state.original:
        state.params["short_factor"] = list(state.params["long_factor"])
        note = f"longrope: long factors throughout, as rows of {seq_len} tokens exceed {state.original}"
    if state.kind != "none" and not state.nested:
        config.rope_parameters = state.params
    return RopeInfo(state.kind, theta, state.factor, state.original, state.covered, note)


def _unscaled(config: PretrainedConfig, state: _State) -> RopeInfo:
    if state.params and not state.nested and state.kind != "default":
        _write(config, _plain(state), state.original)
    kind = "per layer" if state.nested else "default" if state.params else "none"
    theta = None if state.nested else state.params.get("rope_theta")
    return RopeInfo(kind, theta, 1.0, state.original, state.original)


def _scale(
    config: PretrainedConfig, state: _State, scaling: str, factor: float, original: int, seq_len: int
) -> RopeInfo:
    params, covered, theta = _plain(state), int(factor * original), state.params["rope_theta"]
    if scaling == "yarn":
        _write(
            config, params | _yarn_details(state) | {"rope_type": "yarn", "factor": factor}, covered, original
        )
        return RopeInfo("yarn", theta, factor, original, covered)
    if scaling == "linear":
        _write(config, params | {"rope_type": "linear", "factor": factor}, original)
        return RopeInfo("linear", theta, factor, original, covered)
    # Published as "Dynamic NTK" (github.com/jquesnelle/yarn); the length that it looks up in each batch is fixed.
    dim = int(_head_dim(config) * params.get("partial_rotary_factor", 1.0))
    base = theta * (factor * seq_len / original - (factor - 1.0)) ** (dim / (dim - 2))
    _write(config, params | {"rope_theta": base}, seq_len)
    note = f"dynamic: base raised from {theta:g} to {base:g} for rows of {seq_len} tokens"
    return RopeInfo("default", base, factor, original, seq_len, note)


def _plain(state: _State) -> dict[str, Any]:
    """Unscaled parameters: base and the share of the head that turns."""
    kept = {key: state.params[key] for key in ("rope_theta", "partial_rotary_factor") if key in state.params}
    return kept | {"rope_type": "default"}


def _yarn_details(state: _State) -> dict[str, Any]:
    """A checkpoint's own choices for YaRN hold for a larger factor, too."""
    names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate") if state.kind == "yarn" else ()
    return {key: state.params[key] for key in names if key in state.params}


def _write(
    config: PretrainedConfig, params: dict[str, Any], max_length: int, original: int | None = None
) -> None:
    if original is not None:
        params = params | {"original_max_position_embeddings": original}
        if hasattr(config, "original_max_position_embeddings"):
            # Phi-3 keeps it outside; transformers prefers that one.
            config.original_max_position_embeddings = original  # type: ignore[attr-defined]
    config.max_position_embeddings = max_length
    config.rope_parameters = params
    config.standardize_rope_params()
    config.validate_rope()


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
