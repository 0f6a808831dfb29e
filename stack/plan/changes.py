"""Settings changed in a composed configuration, as the command line would: for levers and searches, which re-plan often."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, cast

import yaml

from stack.config.derive import REPO_ROOT
from stack.config.schema import RunConfig

Changes = tuple[tuple[str, Any], ...]
"""(setting or group, value) pairs: ("memory", "lean") takes the preset, ("memory.mlp_tile", 8192) one setting."""


@cache
def preset(group: str, name: str) -> tuple[tuple[str, Any], ...]:
    """Settings of conf/GROUP/NAME.yaml."""
    content = yaml.safe_load((REPO_ROOT / "conf" / group / f"{name}.yaml").read_text(encoding="utf-8"))
    return tuple(content.items())


def changed(cfg: RunConfig, changes: Changes) -> RunConfig:
    """`cfg` with the changes, the later winning. A preset takes the place of the one before it; settings that an experiment
    or the command line had put over that one stay, as they do where the override is pasted."""
    for key, value in changes:
        section, _, name = key.partition(".")
        cfg = (
            _set(cfg, key.split("."), value)
            if name
            else replace(cfg, **{key: _other_preset(key, getattr(cfg, section), value)})
        )
    return cfg


def by_preset(group: str, section: Any) -> tuple[Any, bool]:
    """The section as the preset of its name has it, or its defaults; and whether conf/ holds such a preset."""
    there = (REPO_ROOT / "conf" / group / f"{section.name}.yaml").is_file()
    return type(section)(**dict(preset(group, section.name)) if there else {}), there


def _other_preset(group: str, before: Any, name: str) -> Any:
    """The section with another preset. One that was set by hand to what its preset has anyway cannot be told from it."""
    earlier, _ = by_preset(group, before)
    by_hand = {
        item.name: getattr(before, item.name)
        for item in fields(before)
        if item.name != "name" and getattr(before, item.name) != getattr(earlier, item.name)
    }
    return type(before)(**dict(preset(group, name)) | by_hand)


def _set(owner: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    before = getattr(owner, name)
    if not rest:
        assert name in {item.name for item in fields(owner)}, name
        return replace(owner, **{name: value})
    if is_dataclass(before):
        return replace(owner, **{name: _set(before, rest, value)})
    return replace(owner, **{name: _put(cast("dict[str, Any]", before), rest, value)})


def _put(tree: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """A copy of an open dictionary such as engine.overrides with one leaf set."""
    name, *rest = path
    return {**tree, name: _put(dict(tree.get(name) or {}), rest, value) if rest else value}


def as_overrides(changes: Changes) -> str:
    """To paste behind a command."""
    return " ".join(f"{key}={_text(value)}" for key, value in changes)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
