"""The command line of `launch/submit.py`: a few words of its own, and the overrides of launch/train.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.config.compose import expand_sweep
from stack.errors import ConfigError, Fault

EXAMPLE = "python launch/submit.py +exp=qwen3_1m cluster=slurm cluster.nodes=4"
OWN = ("dry", "status", "prepare")


@dataclass(frozen=True)
class Request:
    """What the user wants."""

    overrides: tuple[str, ...]
    dry: bool = False
    """Write and lint, do not submit."""
    status: Path | None = None
    """A run folder to tell of; nothing else is done then."""
    shards: int = 0
    """Array tasks that prepare the tokens, in place of a run."""
    sweep: bool = False
    """One run for each combination of the values that `overrides` lists."""


def read_arguments(arguments: Sequence[str]) -> Request:
    """Raises ConfigError with every fault in the words that are not overrides."""
    given, rest, sweep = {}, [], False
    for word in arguments:
        name, equals, value = word.partition("=")
        if word in ("-m", "--multirun"):
            sweep = True
        elif name in OWN and equals:
            given[name] = value
        else:
            rest.append(word)
    faults = []
    if given.get("dry", "true").lower() not in ("true", "false"):
        faults.append(Fault("dry", given["dry"], "true or false", "dry=true"))
    shards, folder = given.get("prepare", "1"), given.get("status")
    if not re.fullmatch(r"[1-9]\d{0,3}", shards):
        faults.append(Fault("prepare", shards, "a number of array tasks from 1 to 9999", "prepare=16"))
    if folder is not None and not Path(folder).expanduser().is_dir():
        faults.append(Fault("status", folder, "the folder of a run", "status=runs/NAME"))
    if folder is not None and (rest or sweep):
        faults.append(Fault("status", folder, "nothing beside it", f"leave out {' '.join(rest) or '-m'}"))
    if sweep and "prepare" in given:
        faults.append(Fault("prepare", shards, "no sweep beside it", "leave out -m"))
    if faults:
        raise ConfigError(faults)
    return Request(
        tuple(rest),
        given.get("dry", "false").lower() == "true",
        Path(folder).expanduser().resolve() if folder is not None else None,
        int(shards) if "prepare" in given else 0,
        sweep,
    )


def sweep_runs(overrides: Sequence[str], base: str) -> list[tuple[str, list[str]]]:
    """Name and overrides of each run of a sweep. base: the name that they share. Raises ConfigError.

    A run is named after its own values, as in `base-lr_1e-05-sp_2`, so that the same sweep finds its folders again.
    """
    runs = expand_sweep(overrides)
    if len(runs) == 1:
        raise ConfigError([Fault("-m", "", "several values of a setting", "-m optim.lr=1e-5,2e-5")])
    named = []
    for number, (texts, swept) in enumerate(runs):
        parts = [f"{key.rsplit('.', 1)[-1]}_{value}" for key, value in swept.items() if key != "name"]
        own = swept.get("name", base)
        name = "-".join([own, *parts])
        if parts and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", name):
            name = f"{own}-{number}"
        named.append((name, [*texts, f"name={name}"]))
    if len({name for name, _ in named}) < len(named):  # two settings that end alike, or rounded values
        named = [
            (f"{base}-{number}", [*texts, f"name={base}-{number}"]) for number, (texts, _) in enumerate(runs)
        ]
    return named
