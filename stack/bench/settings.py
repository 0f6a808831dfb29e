"""What is compared, and the settings of each contender."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.config.compose import compose_config
from stack.config.schema import RunConfig
from stack.errors import ConfigError, Fault

BASELINE = "baseline"
"""The contender from DeepSpeed's and transformers' own pieces; every other name is a file of `conf/memory`."""

DEFAULTS = ("model=bench", "data=random", "engine=zero3", "schedule.steps=1", "optim.lr=1e-3")
"""Settings of every contender; those of the command line win."""

OWNED = {
    "memory": "--contenders",
    "data.seq_len": "--lengths",
    "site.device": "--device",
    "exp": "model=NAME",
}
"""Settings that the benchmark makes itself -> what says them."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """One run of the benchmark."""

    contenders: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of a row, over all ranks of a sequence-parallel group; rising."""
    ranks: int
    device: str
    """"cpu" or "cuda"."""
    steps: int
    """Timed steps of each contender at each length."""
    updates: int
    """Steps with real updates at each length, by which the contenders have to agree."""
    threads: int
    """Of each CPU rank."""
    out: Path
    """Folder of the results."""
    overrides: tuple[str, ...]


def read_arguments(arguments: Sequence[str], num_gpus: int) -> BenchSettings:
    """The command line. num_gpus: of this machine."""
    parser = argparse.ArgumentParser(
        prog="python launch/bench.py",
        description="Memory presets and a baseline from DeepSpeed's own pieces, side by side on this machine. Starts its "
        "own ranks; no launcher is needed.",
    )
    add = parser.add_argument
    add(
        "--contenders",
        default="baseline,checkpoint,alst,lean",
        help="baseline and names of conf/memory (%(default)s)",
    )
    add("--lengths", default="4096,16384,32768", help="tokens of a row (%(default)s)")
    add("--steps", type=int, default=5, help="timed steps of each contender and length (%(default)s)")
    add("--updates", type=int, default=2, help="steps by which the contenders have to agree (%(default)s)")
    device = "cuda" if num_gpus else "cpu"
    add("--device", choices=("cpu", "cuda"), default=device, help="where the ranks run (%(default)s)")
    add("--ranks", type=int, help="ranks of each contender (one for each GPU, two on the CPU)")
    add("--threads", type=int, default=1, help="threads of a CPU rank (%(default)s)")
    add("--out", type=Path, default=Path("runs/bench"), help="folder of the results (%(default)s)")
    add(
        "overrides",
        nargs="*",
        metavar="setting=value",
        help="settings of all contenders, as for launch/train.py",
    )
    given = parser.parse_intermixed_args(list(arguments))
    return BenchSettings(
        contenders=tuple(dict.fromkeys(filter(None, given.contenders.split(",")))),
        lengths=tuple(sorted({_tokens(text) for text in given.lengths.split(",") if text})),
        ranks=given.ranks if given.ranks is not None else num_gpus if given.device == "cuda" else 2,
        device=given.device,
        steps=given.steps,
        updates=given.updates,
        threads=given.threads,
        out=given.out,
        overrides=tuple(given.overrides),
    )


def _tokens(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        fault = Fault("--lengths", text, "numbers of tokens, separated by commas", "--lengths 4096,16384")
        raise ConfigError([fault]) from None


def contender_configs(settings: BenchSettings, seq: int) -> dict[str, RunConfig]:
    """The settings of each contender at one length. Raises ConfigError with every fault."""
    faults = list(_faults(settings))
    if faults:
        raise ConfigError(faults)
    configs: dict[str, RunConfig] = {}
    for name in settings.contenders:
        # The baseline has its own levers; `plain` only fills the section.
        memory = "plain" if name == BASELINE else name
        given = [
            *DEFAULTS,
            f"parallel.sp={settings.ranks}",
            f"site.device={settings.device}",
            *settings.overrides,
        ]
        given += [f"data.seq_len={seq}", f"memory={memory}"]
        try:
            configs[name] = compose_config(given, world=settings.ranks)
            faults += _together(name, configs[name], settings)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(list({str(fault): fault for fault in faults}.values()))
    return configs


def _faults(settings: BenchSettings) -> Iterator[Fault]:
    if not settings.contenders:
        yield Fault("--contenders", "", "at least one name", "--contenders baseline,alst")
    if not settings.lengths or settings.lengths[0] < 2:
        yield Fault("--lengths", list(settings.lengths), "numbers of tokens above 1", "--lengths 4096,16384")
    for name in ("steps", "updates", "ranks", "threads"):
        if getattr(settings, name) < 1:
            yield Fault(f"--{name}", getattr(settings, name), "at least 1", f"leave --{name} out")
    for text in settings.overrides:
        key = text.lstrip("+~").partition("=")[0]
        if key in OWNED:
            yield Fault(key, text, "no setting that the benchmark owns", f"use {OWNED[key]}")


def _together(name: str, cfg: RunConfig, settings: BenchSettings) -> Iterator[Fault]:
    uneven = [length for length in settings.lengths if length % cfg.parallel.sp]
    if uneven:
        want = f"lengths that parallel.sp={cfg.parallel.sp} divides: the baseline cannot pad"
        yield Fault("--lengths", uneven, want, "change --lengths")
    if cfg.engine.accumulation != 1:
        yield Fault(
            "engine.accumulation", cfg.engine.accumulation, "1", "leave it out: a step is one micro-batch"
        )
    if name != BASELINE:
        return
    if cfg.engine.stage != 3:
        yield Fault("engine.stage", cfg.engine.stage, "3, at which the baseline is built", "leave it out")
    if cfg.data.micro_batch != 1:
        want = "1: the tiles of DeepSpeed's MLP go wrong over several rows"
        yield Fault("data.micro_batch", cfg.data.micro_batch, want, "leave it out, or leave out the baseline")
    if cfg.model.architecture.get("tie_word_embeddings"):
        want = "false: DeepSpeed's tiled loss gives wrong gradients to tied weights under ZeRO-3"
        yield Fault(
            "model.architecture.tie_word_embeddings", True, want, "set it to false, or leave out the baseline"
        )
