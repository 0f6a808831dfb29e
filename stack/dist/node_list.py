"""Slurm's short form for the names of many nodes."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess

from stack.errors import LaunchError


def expand_node_list(text: str) -> list[str]:
    """Names behind Slurm's short form, in order: `a[01-03,07],b1` gives a01 a02 a03 a07 b1.

    A form not known here is left to `scontrol show hostnames`. Raises LaunchError where that is not there or fails.
    """
    try:
        return [name for part in _split_outside_brackets(text) for name in _expand(part)]
    except ValueError as error:
        scontrol = shutil.which("scontrol")
        if scontrol is None:
            raise LaunchError(
                f"the node list {text!r} cannot be read ({error}). Fix: export MASTER_ADDR"
            ) from error
    result = subprocess.run(
        [scontrol, "show", "hostnames", text], capture_output=True, text=True, check=False, timeout=30
    )
    if result.returncode or not result.stdout.split():
        raise LaunchError(
            f"scontrol cannot read the node list {text!r}: {result.stderr.strip()}. Fix: export MASTER_ADDR"
        )
    return result.stdout.split()


def _split_outside_brackets(text: str) -> list[str]:
    if not re.fullmatch(r"(?:[^\[\],]+|\[[^\[\]]+\]|,)+", text):
        raise ValueError("unbalanced brackets")
    parts = re.findall(r"(?:[^\[\],]+|\[[^\[\]]+\])+", text)
    if sum(map(len, parts)) + len(parts) - 1 != len(text):
        raise ValueError("an empty name")
    return parts


def _expand(part: str) -> list[str]:
    pieces = re.findall(r"\[([^\[\]]+)\]|([^\[\]]+)", part)
    choices = [_numbers(inside) if inside else [plain] for inside, plain in pieces]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _numbers(ranges: str) -> list[str]:
    names: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"not a range: {item!r}")
        first, last = match[1], match[2] or match[1]
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names
