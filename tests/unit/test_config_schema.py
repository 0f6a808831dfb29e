"""The schema is the manual: every setting is explained, has a range, and takes values as people write it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from stack.config import (
    schema,
    schema_checkpoint,
    schema_cluster,
    schema_data,
    schema_faults,
    schema_plan,
    schema_site,
)
from stack.config.convert import ELSEWHERE_CALLED, as_dict, as_yaml, convert, known_keys, nearest_keys
from stack.config.ranges import RANGES
from stack.config.schema import RunConfig

# Numbers whose range hangs on another setting: it is in checks.py.
RANGED_ELSEWHERE = {"data.vocab_size"}


MODULES = (schema, schema_checkpoint, schema_cluster, schema_data, schema_faults, schema_plan, schema_site)


def _classes() -> Iterator[ast.ClassDef]:
    for module in MODULES:
        tree = ast.parse(inspect.getsource(module))
        yield from (node for node in tree.body if isinstance(node, ast.ClassDef))


def test_every_setting_has_a_docstring() -> None:
    silent = []
    for node in _classes():
        if not ast.get_docstring(node):
            silent.append(node.name)
        for item, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if not said or len(str(following.value.value)) < 8:  # type: ignore[union-attr]
                    silent.append(f"{node.name}.{item.target.id}")
    assert silent == []


def test_schema_is_made_of_dataclasses_with_keywords_only() -> None:
    names = {name: value for module in MODULES for name, value in vars(module).items()}
    classes = [names[node.name] for node in _classes()]
    assert len(classes) >= 12
    for cls in classes:
        assert is_dataclass(cls) and all(item.kw_only for item in fields(cls)), cls


def _is_number(hint: Any) -> bool:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return int in parts or float in parts


def test_every_number_has_a_range_and_an_example_inside() -> None:
    numbers = {key for key, hint in known_keys().items() if _is_number(hint)}
    assert numbers - set(RANGES) == RANGED_ELSEWHERE
    assert set(RANGES) <= set(known_keys())
    for key, (allowed, example) in RANGES.items():
        value = yaml.safe_load(example) if isinstance(example, str) and example[0] == "[" else example
        assert allowed.holds(value), key


def test_defaults_survive_a_round_trip_through_yaml() -> None:
    assert convert(yaml.safe_load(as_yaml(RunConfig()))) == (RunConfig(), [])


def _tree(key: str, value: Any) -> dict[str, Any]:
    tree = as_dict(RunConfig())
    *sections, name = key.split(".")
    place = tree
    for section in sections:
        place = place[section]
    place[name] = value
    return tree


def _get(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("optim.lr", "1e-5", 1e-5),  # text for a YAML 1.1 reader
        ("optim.lr", 1, 1.0),
        ("data.seq_len", 1e6, 1_000_000),
        ("data.seq_len", "4_096", 4096),
        ("data.seq_len", "1e6", 1_000_000),
        ("schedule.steps", None, None),
        ("schedule.steps", "12", 12),
        ("engine.stage", "2", 2),
        ("engine.precision", "fp32", "fp32"),
        ("name", 7, "7"),
        ("log.tags", ["a", 1], ["a", "1"]),
        ("optim.betas", ["0.9", 0], [0.9, 0.0]),
        ("model.architecture", {"any": {"thing": 1}}, {"any": {"thing": 1}}),
    ],
)
def test_values_as_people_write_them(key: str, written: object, meant: object) -> None:
    cfg, faults = convert(_tree(key, written))
    assert faults == []
    assert _get(cfg, key) == meant and type(_get(cfg, key)) is type(meant)


@pytest.mark.parametrize(
    ("key", "written", "want"),
    [
        ("optim.lr", True, "a finite number"),
        ("optim.lr", float("nan"), "a finite number"),
        ("optim.lr", "inf", "a finite number"),
        ("optim.lr", [1], "a finite number"),
        ("optim.lr", None, "a finite number"),
        ("data.seq_len", 1.5, "a whole number"),
        ("data.seq_len", False, "a whole number"),
        ("data.seq_len", "many", "a whole number"),
        ("schedule.steps", "???", "a whole number or null"),
        ("data.shuffle", "yes", "true or false"),
        ("data.shuffle", 1, "true or false"),
        ("engine.stage", 4, "one of 0, 1, 2, 3"),
        ("engine.stage", True, "one of 0, 1, 2, 3"),
        ("log.wandb", False, "one of auto, online, offline, disabled"),  # what YAML makes of `off`
        ("name", 1.5, "text"),
        ("name", None, "text"),
        ("optim.betas", 0.9, "a list, each item a finite number"),
        ("model.freeze", "*norm*", "a list, each item text"),
        ("model.architecture", "qwen3", "a section"),
        ("optim", 3, "a section"),
        ("model.rope", None, "a section"),
    ],
)
def test_wrong_types_are_named(key: str, written: object, want: str) -> None:
    _, faults = convert(_tree(key, written))
    assert [fault.key for fault in faults] == [key]
    assert want in faults[0].want and faults[0].fix


def test_every_wrong_value_and_unknown_name_is_reported_at_once() -> None:
    tree = _tree("optim.lr", "fast")
    tree["data"]["seq_length"] = 8
    tree["memroy"] = {}
    del tree["optim"]["clip"]
    tree["engine"]["precision"] = "fp8"
    _, faults = convert(tree)
    assert {fault.key for fault in faults} == {
        "optim.lr", "data.seq_length", "memroy", "optim.clip", "engine.precision",
    }  # fmt: skip
    assert "data.seq_len" in next(fault.fix for fault in faults if fault.key == "data.seq_length")


@pytest.mark.parametrize(
    ("typo", "real"),
    [
        ("lr", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("train.seq_len", "data.seq_len"),
        ("memory.tiledloss", "memory.tiled_loss"),
        ("optimizer.lr", "optim.lr"),
        ("engine.offload_params", "engine.offload_param"),
        ("modl.path", "model.path"),
        ("shedule", "schedule"),
    ],
)
def test_the_nearest_real_name(typo: str, real: str) -> None:
    assert real in nearest_keys(typo)


def test_names_of_other_trainers_lead_to_real_ones() -> None:
    assert set(ELSEWHERE_CALLED.values()) <= set(known_keys())


def test_known_keys_follow_the_dataclasses() -> None:
    assert known_keys()["optim.lr"] is float
    assert known_keys()["model.rope.scaling"] == get_type_hints(schema.RopeConfig)["scaling"]
