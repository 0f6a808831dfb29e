"""From a command line to a RunConfig. The only file that knows Hydra.

Overrides are looked at before Hydra sees them, so that every unknown name is reported at once with the
nearest real one, also behind `+`, `++` and `~`. The composed values then go through `convert.py` and
`checks.py`, and one ConfigError carries all that was found.
"""

from __future__ import annotations

import difflib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stack.config.checks import check
from stack.config.convert import (
    as_dict,
    below_open_key,
    convert,
    known_keys,
    leaves,
    takes_any_name,
    unknown_key,
)
from stack.config.derive import REPO_ROOT
from stack.config.help import help_text
from stack.config.schema import RunConfig
from stack.errors import ConfigError, Fault

CONF = REPO_ROOT / "conf"
GROUPS = ["exp", *(item.name for item in fields(RunConfig) if is_dataclass(known_keys()[item.name]))]
"""Folders of `conf/`: one a section of the schema, and the experiments."""

QUESTIONS = {"help", "h", "hydra-help", "version", "cfg", "c", "info", "i", "shell-completion", "sc"}
"""Hydra's own flags that are answered on the console, without a run."""


def from_command_line(
    arguments: Sequence[str],
    world: Callable[[], int] | None = None,
    only: Sequence[str] = (),
    strict: bool = True,
) -> RunConfig | None:
    """The run that the command line asks for; None if it asked a question (`--help`), which is answered here.

    arguments: without the program's name. world: gives the number of ranks where they matter; not called for
    a question. only: sections whose settings are judged, for a command that reads no others. strict: as in
    `compose_config`. Raises ConfigError.
    """
    arguments, folder = _take_config_dir(list(arguments))
    flags = [text.split("=")[0] for text in arguments if text.startswith("-")]
    if any(flag.lstrip("-") in QUESTIONS for flag in flags):
        _answer(arguments, folder)
        return None
    if flags:
        want = "settings such as optim.lr=1e-5, --config-dir FOLDER, or a question such as --help"
        raise ConfigError([Fault(flag, "", want, "one command starts one run") for flag in flags])
    return compose_config(arguments, strict, world() if world else None, folder, only)


def expand_sweep(arguments: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """The command lines of a sweep such as `optim.lr=1e-5,2e-5 parallel.sp=2,4`, and which swept values make each: every
    combination, the last one changing fastest. Raises ConfigError for a sweep without end, such as an interval."""
    ways: list[list[tuple[str, str | None, str]]] = []
    parser = OverridesParser.create()
    for text in arguments:
        override = None
        with suppress(HydraException):  # no override, or one that is told of when the runs are composed
            override = parser.parse_override(text)
        if override is None or not override.is_sweep_override():
            ways.append([(text, None, "")])
        elif override.is_discrete_sweep():
            key = override.get_key_element()
            values = [str(value) for value in override.sweep_string_iterator()]
            ways.append([(f"{key}={value}", override.key_or_group, value) for value in values])
        else:
            want = "values one by one, such as 1e-5,2e-5 or range(1,4)"
            raise ConfigError([Fault(override.key_or_group, text.partition("=")[2], want, "list them")])
    return [
        ([text for text, _, _ in way], {key: value for _, key, value in way if key is not None})
        for way in itertools.product(*ways)
    ]


def compose_config(
    overrides: Sequence[str],
    strict: bool = True,
    world: int | None = None,
    folder: str | None = None,
    only: Sequence[str] = (),
) -> RunConfig:
    """The run that `conf/` and `overrides` describe.

    strict: also check what the settings mean together. world: number of ranks, None if unknown. folder: a
    further folder laid out like `conf/`. only: sections to judge, all if empty; a wrong name or type is a fault in any.
    Raises ConfigError with every fault.
    """
    screened, faults = _screen(overrides, folder)
    tree = _compose(screened, faults, folder)
    cfg, wrong = convert(tree)
    faults += wrong
    bad = {fault.key for fault in faults}
    if strict and "exp" not in bad:  # an experiment in the wrong place has set nothing that could be judged
        found = [fault for fault in check(cfg, world) if fault.key not in bad]
        faults += [fault for fault in found if not only or fault.key.split(".")[0] in only]
    if faults:
        raise ConfigError(faults)
    return cfg


@cache
def _offer_schema() -> None:
    """Let `conf/config.yaml` start from every setting at its default. A plain dict, since OmegaConf's own
    typed configs refuse Literal; the types are checked by `convert.py`."""
    ConfigStore.instance().store(name="schema", node=as_dict(RunConfig()))


def _compose(overrides: list[str], faults: list[Fault], folder: str | None) -> dict[str, Any]:
    """Plain nested dict of the composed values. Raises ConfigError with `faults` and the one that Hydra stops
    at."""
    _offer_schema()
    if folder:
        overrides = [*overrides, f"hydra.searchpath=['file://{Path(folder).resolve()}']"]
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra.compose("config", overrides)
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([*faults, _translate(error)]) from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _answer(arguments: list[str], folder: str | None) -> None:
    """Answer `--help`, and let Hydra answer questions such as `--cfg job` or `--info defaults-tree`."""
    is_override = [not text.startswith("-") and "=" in text for text in arguments]
    overrides = [text for text, override in zip(arguments, is_override, strict=True) if override]
    rest = [text for text, override in zip(arguments, is_override, strict=True) if not override]
    if not {"--shell-completion", "-sc"} & set(rest):
        overrides, faults = _screen(overrides, folder)
        if faults:
            raise ConfigError(faults)
    if {"--help", "-h"} & set(rest):
        settings = yaml.safe_dump(_compose(overrides, [], folder), sort_keys=False, width=120)
        print(help_text({group: _options(group, folder) for group in GROUPS}, settings))
        return
    _offer_schema()
    extra = ["--config-dir", folder] if folder else []
    sys.argv = [sys.argv[0], *rest, *extra, *overrides]  # where Hydra reads its arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, in place of printing and leaving
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(_no_run)()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([_translate(error)]) from error


def _no_run(_: Any) -> NoReturn:
    raise HydraException("this combination of flags starts a run")


def _take_config_dir(arguments: list[str]) -> tuple[list[str], str | None]:
    """Arguments without `--config-dir FOLDER`, and the folder. Raises ConfigError if it does not exist."""
    folder, rest, texts = None, [], iter(arguments)
    for text in texts:
        flag, equals, value = text.partition("=")
        if flag in ("--config-dir", "-cd"):
            folder = value if equals else next(texts, "")
            if not Path(folder).is_dir():
                raise ConfigError([Fault(flag, folder, "a folder laid out like conf/", "check the path")])
        else:
            rest.append(text)
    return rest, folder


def _screen(texts: Sequence[str], folder: str | None) -> tuple[list[str], list[Fault]]:
    """Overrides as Hydra takes them, and the faults of the others.

    Signs are put right: nobody has to know that a group outside the defaults list wants `+`. Raises
    ConfigError at once if a group or experiment does not exist, since no later check would mean anything.
    """
    good: list[str] = []
    faults: list[Fault] = []
    choices: list[Fault] = []
    parser = OverridesParser.create()
    for text in texts:
        try:
            override = parser.parse_override(text)
        except HydraException as error:  # of the parser; the texts differ, the first line says it
            key, _, value = text.partition("=")
            want = f"an override of the form key=value ({_first_line(error)})"
            fix = f"quote special characters for Hydra and the shell: '{key}=\"{value}\"'"
            faults.append(Fault(key, value, want, fix))
            continue
        key, plain = override.key_or_group, text.lstrip("+~")
        own = list(_faults_of(override, folder))
        if key in GROUPS:
            choices += own
            good += [] if own else ["+" + plain if key == "exp" else plain]
        else:
            faults += own
            keep = _is_hydras(key) or override.is_delete()
            good += [] if own else [text if keep else "++" + plain if takes_any_name(key) else plain]
    if choices:
        raise ConfigError(choices + faults)
    return good, faults


def _faults_of(override: Override, folder: str | None) -> Iterator[Fault]:
    key = override.key_or_group
    if override.is_sweep_override():
        want = "one value: a command starts one run"
        value = (override.input_line or "").partition("=")[2]
        yield Fault(key, value, want, f"a list is written {key}=[a,b], a comma in text \"{key}='a,b'\"")
        return
    value = override.value()
    if _is_hydras(key):
        return
    if override.package is not None:
        yield Fault(f"{key}@{override.package}", value, "a group in its own place", f"{key}={value}")
    elif override.is_delete() and not below_open_key(key):
        fix = f"leave it out, or set {key}=..."
        yield Fault(f"~{key}", value, "no deletion: every setting has a value", fix)
    elif key in GROUPS:
        for choice in value if isinstance(value, list) else [value]:
            yield from _choice_faults(key, choice, _options(key, folder))
    else:
        for name, leaf in leaves({key: value}):
            if name not in known_keys() and not below_open_key(name):
                yield unknown_key(name, leaf)


def _is_hydras(key: str) -> bool:
    return key.replace("/", ".").split(".")[0] == "hydra"


def _choice_faults(group: str, choice: object, options: Sequence[str], where: str = "") -> Iterator[Fault]:
    if str(choice).removesuffix(".yaml") in options:
        return
    near = difflib.get_close_matches(str(choice), options, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(near)}?" if near else f"take one, or add conf/{group}/NAME.yaml"
    yield Fault(group, choice, f"one of {', '.join(options)}{where}", fix)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _options(group: str, folder: str | None) -> list[str]:
    roots = [CONF / group, Path(folder) / group] if folder else [CONF / group]
    files = [path.relative_to(root) for root in roots for path in root.rglob("*.yaml")]
    return sorted({file.with_suffix("").as_posix() for file in files})


def _translate(error: Exception) -> Fault:
    """The fault behind an exception of Hydra, OmegaConf or the YAML reader."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        where = ", as the defaults list of a file in conf/ has it"
        for fault in _choice_faults(group, choice, sorted(error.options or ()), where):
            return fault
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return Fault(mark.name, f"line {mark.line + 1}", f"valid YAML ({error.problem})", "mend the file")
    if isinstance(error, OmegaConfBaseException):
        want, fix = "a value that can be resolved", "mend the reference"
        return Fault(error.full_key or "conf", _first_line(error), want, fix)
    cause = f": {error.__cause__}" if error.__cause__ is not None else ""
    message = " ".join(f"{error}{cause}".split())
    return Fault("conf", message, "files and overrides that Hydra can put together", "mend what it names")
