"""Plain nested dicts to the dataclasses of `schema.py`: every unknown key, wrong type and choice at once.

Knows nothing of Hydra and of what values mean together (`checks.py` does). A wrong value leaves the default
in its place, so that the checks after it can still report what else is wrong.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from stack.config.schema import RunConfig
from stack.errors import Fault

UNSET = "???"
"""What a YAML file writes for a value that the user has to give."""


ELSEWHERE_CALLED = {
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip",
    "batch_size": "data.micro_batch",
    "per_device_train_batch_size": "data.micro_batch",
    "gradient_accumulation_steps": "engine.accumulation",
    "gradient_checkpointing": "memory.checkpointing",
    "max_length": "data.seq_len",
    "max_steps": "schedule.steps",
    "num_train_epochs": "schedule.epochs",
    "output_dir": "out",
    "bf16": "engine.precision",
    "sequence_parallel_size": "parallel.sp",
    "assistant_only_loss": "data.loss_on",
    "completion_only_loss": "data.loss_on",
    "train_on_inputs": "data.loss_on",
}
"""What other trainers call our settings: too far from our names for a comparison of letters."""


class _Refused(Exception):
    """A value that does not fit its field: what was wanted, and how to mend it."""

    def __init__(self, want: str, fix: str):
        super().__init__(want)
        self.want, self.fix = want, fix


def convert(data: Mapping[str, Any]) -> tuple[RunConfig, list[Fault]]:
    """The run that `data` describes and the faults found; where there are some, defaults stand in."""
    faults: list[Fault] = []
    return _section(RunConfig, data, "", faults), faults


def as_dict(cfg: Any) -> dict[str, Any]:
    """Nested dict of plain values, in the order of the schema."""
    return asdict(cfg)


def as_yaml(cfg: RunConfig) -> str:
    """The resolved configuration as it is saved with a run; `convert(yaml.safe_load(...))` gives it back."""
    return yaml.safe_dump(as_dict(cfg), sort_keys=False, allow_unicode=True, width=120)


def describe(hint: Any) -> str:
    """A type of the schema in words."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe(part) for part in get_args(hint))
    if get_origin(hint) is list:
        return f"a list, each item {describe(get_args(hint)[0])}"
    if get_origin(hint) is dict or is_dataclass(hint):
        return "a section of named settings"
    words = {
        int: "a whole number",
        float: "a finite number",
        str: "text",
        bool: "true or false",
        NoneType: "null",
    }
    return words[hint]


@cache
def known_keys() -> dict[str, Any]:
    """Dotted name of every setting and section -> its type, e.g. `optim.lr` -> float."""
    return dict(_walk(RunConfig, ""))


def below_open_key(key: str) -> bool:
    """Whether `key` lies inside a setting that takes any names, such as `model.architecture.hidden_size`."""
    return any(get_origin(hint) is dict and key.startswith(name + ".") for name, hint in known_keys().items())


def takes_any_name(key: str) -> bool:
    """Whether `key` is such a setting itself, or lies inside one."""
    return get_origin(known_keys().get(key)) is dict or below_open_key(key)


def nearest_keys(key: str, limit: int = 3) -> list[str]:
    """Real names that the unknown `key` may mean, best first."""
    # A name with a dot means a setting, and the sections would only take the place of better guesses.
    names = [name for name, hint in known_keys().items() if "." not in key or not is_dataclass(hint)]
    leaf = key.rsplit(".", 1)[-1]
    found = [ELSEWHERE_CALLED[leaf]] if leaf in ELSEWHERE_CALLED else []
    found += [name for name in names if name.rsplit(".", 1)[-1] == leaf]
    found += difflib.get_close_matches(key, names, n=limit, cutoff=0.65)
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
    found += [leaves[near] for near in difflib.get_close_matches(leaf, list(leaves), n=limit, cutoff=0.6)]
    return list(dict.fromkeys(found))[:limit]


def unknown_key(key: str, got: object) -> Fault:
    """The fault of a name that the schema lacks."""
    if key == "exp" or key.startswith("exp."):
        return Fault(
            key, got, "no section of this name", "start the file in conf/exp with '# @package _global_'"
        )
    near = nearest_keys(key)
    parent = key.rpartition(".")[0]
    section = parent if is_dataclass(known_keys().get(parent)) else ""
    here = [name for name in known_keys() if name.rpartition(".")[0] == section]
    fix = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(here)}"
    return Fault(key, got, "a known setting", fix)


def _walk(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(cls).items():
        yield prefix + name, hint
        if is_dataclass(hint):
            yield from _walk(hint, f"{prefix}{name}.")


def _section(cls: Any, raw: Any, prefix: str, faults: list[Fault]) -> Any:
    if not isinstance(raw, Mapping):
        faults.append(
            Fault(prefix.rstrip("."), raw, "a section of named settings", "give its settings below it")
        )
        return cls()
    hints = get_type_hints(cls)
    faults.extend(unknown_key(f"{prefix}{name}", value) for name, value in raw.items() if name not in hints)
    values = {}
    for item in fields(cls):
        key, hint = prefix + item.name, hints[item.name]
        given = raw.get(item.name, UNSET)
        if is_dataclass(hint):
            values[item.name] = _section(hint, {} if given == UNSET else given, key + ".", faults)
            continue
        try:
            if given == UNSET:
                raise _Refused(f"a value ({describe(hint)})", f"set it, e.g. on the command line: {key}=...")
            values[item.name] = _value(key, given, hint, faults)
        except _Refused as refusal:
            faults.append(Fault(key, given, refusal.want, refusal.fix))
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            values[item.name] = default
    return cls(**values)


def _value(key: str, raw: Any, hint: Any, faults: list[Fault]) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        if raw is None:
            return None
        (inner,) = [part for part in get_args(hint) if part is not NoneType]
        return _value(key, raw, inner, faults)
    if origin is Literal:
        return _choice(key, raw, hint)
    if origin is list:
        if not isinstance(raw, list | tuple):
            raise _Refused(describe(hint), f"write {key}=[{raw}]")
        (inner,) = get_args(hint)
        if isinstance(inner, type) and is_dataclass(inner):
            filled = [asdict(inner()) | dict(item) if isinstance(item, Mapping) else item for item in raw]
            return [_section(inner, item, f"{key}.{number}.", faults) for number, item in enumerate(filled)]
        return [_value(key, item, inner, faults) for item in raw]
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise _Refused(describe(hint), f"give its settings below it: {key}.NAME=VALUE")
        return copy.deepcopy(dict(raw))
    if hint is bool:
        if isinstance(raw, bool):
            return raw
        raise _Refused(describe(bool), f"write {key}=true or {key}=false, without quotes")
    return _text(key, raw) if hint is str else _number(key, raw, hint)


def _text(key: str, raw: Any) -> str:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, int) and not isinstance(raw, bool):  # a run may well be named 7
        return str(raw)
    raise _Refused(describe(str), f"quote it if it is meant as text: \"{key}='{raw}'\"")


def _number(key: str, raw: Any, kind: type) -> int | float:
    """Numbers as people and YAML write them: 1e6 for a whole number, and text such as '1e-5', which YAML 1.1
    takes for a string. A truth value is no number, and NaN and inf have no use in any setting."""
    number: int | float
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise _Refused(describe(kind), f"write {key} as a plain number")
    try:
        number = int(raw) if isinstance(raw, int | str) else raw
    except ValueError:
        try:
            number = float(raw)
        except ValueError:
            raise _Refused(describe(kind), f"write {key} as a plain number") from None
    if not math.isfinite(number):
        raise _Refused(describe(kind), f"write {key} as a plain number")
    if kind is int and number != int(number):
        raise _Refused(describe(int), f"e.g. {key}={round(number)}")
    return kind(number)


def _choice(key: str, raw: Any, hint: Any) -> Any:
    choices = get_args(hint)
    if not isinstance(raw, bool):
        for choice in choices:
            if raw == choice or (isinstance(raw, str) and raw == str(choice)):
                return choice
    near = difflib.get_close_matches(str(raw).lower(), [str(choice) for choice in choices], n=1, cutoff=0.5)
    quoted = " (quoted in YAML: off, no, on and yes are truth values there)" if isinstance(raw, bool) else ""
    raise _Refused(describe(hint), f"e.g. {key}={near[0] if near else choices[0]}{quoted}")


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every entry that is not itself a section; an empty section is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
