"""The command line of `launch/plan.py`: a few words of its own, and the overrides of launch/train.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stack.config import derive
from stack.config.compose import from_command_line
from stack.config.schema import RunConfig
from stack.errors import ConfigError, Fault
from stack.plan import report
from stack.plan.forecast import Forecast
from stack.plan.levers import Lever, Run, faults_of, room_left, stack_levers, try_levers
from stack.plan.machine import read_machine
from stack.plan.search import Point, fewest_gpus, longest, sweep_lengths, what_ends
from stack.plan.verdict import EXIT_CODES, NO, Verdict, verdict

APART = 0.03
"""Share by which the tiers may differ before both are shown."""

WORDS = {
    "gpus": "ranks of the run; without it cluster.nodes times its GPUs, or parallel.sp where no cluster is set",
    "documents": "file of document lengths in tokens, one a line, or a comma-separated list: rows are filled with them",
    "calibration": "file or run folder of what was measured on the machine",
    "search": "max_seq or min_gpus",
    "sweep": "seq:LENGTH,LENGTH,...",
    "exact": "true: count the run's own step as well",
    "layers": "of the exact count: auto, all, or a number",
    "levers": "false: do not look for what would save memory",
    "json": "file to write everything to",
    "png": "file for the picture of a search or sweep",
    "probe": "true: measure this machine's constants (on the GPUs that train)",
}

Exact = Callable[[RunConfig, int, "str | int"], Forecast]


@dataclass(frozen=True)
class Request:
    """words: those of `WORDS` that were given; overrides: of the run."""

    words: dict[str, str]
    overrides: tuple[str, ...]

    def flag(self, name: str, default: bool) -> bool:
        return self.words.get(name, str(default)).lower() == "true"


def read_arguments(arguments: Sequence[str]) -> Request:
    """Raises ConfigError with every fault in the words that are not overrides."""
    words: dict[str, str] = {}
    rest: list[str] = []
    faults: list[Fault] = []
    for text in arguments:
        name, equals, value = text.partition("=")
        if name in WORDS and equals:
            if name in words:
                want = f"a word given once: {name}={words[name]} stands before it"
                faults.append(Fault(name, value, want, "leave one of them out"))
            words[name] = value
        else:
            rest.append(text)
    faults += [
        Fault(name, words[name], "true or false", f"{name}=true")
        for name in ("exact", "levers", "probe")
        if words.get(name, "true").lower() not in ("true", "false")
    ]
    if not re.fullmatch(r"[1-9]\d{0,5}", words.get("gpus", "1")):
        faults.append(Fault("gpus", words["gpus"], "a number of ranks", "gpus=8"))
    if words.get("search", "max_seq") not in ("max_seq", "min_gpus"):
        faults.append(Fault("search", words["search"], "max_seq or min_gpus", "search=max_seq"))
    if "sweep" in words and not re.fullmatch(r"seq:[1-9]\d*(,[1-9]\d*)*", words["sweep"]):
        faults.append(Fault("sweep", words["sweep"], "seq: and lengths in tokens", "sweep=seq:131072,262144"))
    if not re.fullmatch(r"auto|all|[1-9]\d*", words.get("layers", "auto")):
        faults.append(Fault("layers", words["layers"], "auto, all or a number of layers", "layers=auto"))
    if not words.get("png", ".png").lower().endswith(".png"):
        faults.append(Fault("png", words["png"], "a file whose name ends with .png", "png=/tmp/plan.png"))
    if "search" in words and "sweep" in words:
        faults.append(Fault("sweep", words["sweep"], "nothing beside search", "leave one of them out"))
    if faults:
        raise ConfigError(faults)
    return Request(words, tuple(rest))


def num_ranks(cfg: RunConfig, given: str | None) -> int:
    """Ranks of the run to be planned."""
    if given is not None:
        return int(given)
    if cfg.cluster.scheduler != "none":
        return cfg.cluster.nodes * derive.ranks_per_node(cfg.cluster)
    return cfg.parallel.sp


def read_run(request: Request) -> Run | None:
    """None if the command line asked one of Hydra's questions, which is answered then. Raises ConfigError with every fault."""
    cfg = from_command_line(request.overrides, strict=False)
    if cfg is None:
        return None
    world = num_ranks(cfg, request.words.get("gpus"))
    if faults := faults_of(cfg, world):
        raise ConfigError(faults)
    machine = read_machine(cfg.site, request.words.get("calibration"))
    given = request.words.get("documents")
    return Run(cfg, world, machine, _document_lengths(given) if given else None)


def _document_lengths(given: str) -> tuple[int, ...]:
    text = given
    if not re.fullmatch(r"[\d,]+", given):
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            want = f"a file of lengths, or lengths with commas between ({cause})"
            raise ConfigError([Fault("documents", given, want, "documents=1200,53000")]) from error
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        want = "lengths in tokens, one a line or with commas between"
        raise ConfigError([Fault("documents", given, want, "documents=1200,53000")])
    return tuple(int(word) for word in words)


def run_command(arguments: Sequence[str], exact: Exact, tell: Callable[[str], None] = print) -> int:
    """Plan, and tell. exact: `stack/bench/exact.py: count`. Returns the exit code, see `verdict.EXIT_CODES`."""
    request = read_arguments(arguments)
    run = read_run(request)
    if run is None:
        return 0
    found = run.plan()
    told: dict[str, Any] = {"forecast": found.forecast.as_dict()}
    if request.flag("exact", False):
        found, counted = _with_exact(request, run, found, exact, tell)
        told["exact"] = counted.as_dict()
    tell(report.report(found))
    if "search" in request.words or "sweep" in request.words:
        points, code = _search(request, run, tell)
        told["points"] = [{"changes": dict(point.changes)} | _as_dict(point.found) for point in points]
    else:
        code = found.exit_code
        if request.flag("levers", True):
            ranked, stacked = _levers(run, found, tell)
            told["levers"] = [_lever_dict(lever) for lever in ranked]
            told["stacked"] = [_lever_dict(lever) for lever in stacked]
    told["verdict"] = _as_dict(found)
    if file := request.words.get("json"):
        path = Path(file).expanduser()
        with _written("json", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(told, indent=1), encoding="utf-8")
        tell(f"\nwritten: {path}")
    return code


@contextmanager
def _written(word: str, path: Path) -> Iterator[None]:
    """Raises ConfigError where the file cannot be written."""
    try:
        yield
    except OSError as error:
        want = f"a file that can be written here ({error.strerror or error})"
        raise ConfigError([Fault(word, str(path), want, f"{word}=/tmp/plan.{word}")]) from error


def _with_exact(
    request: Request, run: Run, closed: Verdict, exact: Exact, tell: Callable[[str], None]
) -> tuple[Verdict, Forecast]:
    """The verdict by the exact count where the tiers differ, else by the closed form, whose time it keeps; and the count."""
    layers = request.words.get("layers", "auto")
    counted = exact(run.cfg, run.world, int(layers) if layers.isdigit() else layers)
    apart = closed.forecast.memory.peak.num_bytes / counted.memory.peak.num_bytes - 1
    tell(report.tier_lines(closed.forecast, counted, apart) + "\n")
    mine = closed.forecast
    counted.run = mine.run | counted.run
    counted.time, counted.constants, counted.steps = mine.time, mine.constants, mine.steps
    counted.checkpoint_bytes = counted.checkpoint_bytes or mine.checkpoint_bytes
    counted.memory.communication_bytes = mine.memory.communication_bytes
    counted.memory.overhead_bytes = mine.memory.overhead_bytes
    counted.host.buffer_bytes = counted.host.buffer_bytes or mine.host.buffer_bytes
    counted.host.checkpoint_copy_bytes = mine.host.checkpoint_copy_bytes
    counted.host.ranks_a_node = mine.host.ranks_a_node
    return verdict(counted, run.machine) if abs(apart) > APART else closed, counted


def _levers(run: Run, found: Verdict, tell: Callable[[str], None]) -> tuple[list[Lever], list[Lever]]:
    ranked = try_levers(run, found)
    if ranked:
        tell("\n" + report.lever_table(ranked, "levers, each by itself, the cheapest first"))
    stacked = stack_levers(run, found, ranked)
    if text := report.stacked_lines(stacked, bool(stacked) and room_left(stacked[-1].found)):
        tell("\n" + text)
    elif found.answer == NO:
        tell("\nno lever here is enough: a larger card, more GPUs with more heads, or a shorter row")
    return ranked, stacked


def _search(request: Request, run: Run, tell: Callable[[str], None]) -> tuple[list[Point], int]:
    kind = request.words.get("search", "sweep")
    if kind == "max_seq":
        points = longest(run)
        fitting = [point for point in points if point.fits]
        title = (
            f"longest row: {fitting[-1].seq_len:,} tokens" if fitting else "not even the shortest row fits"
        )
    elif kind == "min_gpus":
        points = fewest_gpus(run)
        fitting = [point for point in points if point.fits]
        title = f"fewest GPUs: {fitting[-1].label}" if fitting else f"no number up to {points[-1].label} fits"
    else:
        lengths = {int(text) for text in request.words["sweep"].partition(":")[2].split(",")}
        points = sweep_lengths(run, sorted(lengths))
        fitting, title = [point for point in points if point.fits], "lengths"
    if kind == "max_seq":
        title += f"; beyond it {what_ends(run, points)}" if fitting else f": {what_ends(run, points)}"
    tell(f"\n{title}\n{report.point_table(points)}")
    from stack.plan.chart import draw

    file = Path(request.words.get("png") or f"plan_{run.cfg.name}_{kind}.png").expanduser()
    with _written("png", file):
        draw(points, f"{run.cfg.model.name} on {run.cfg.site.card or run.cfg.site.name}: {title}", file)
    tell(f"\npicture: {file}")
    return points, 0 if fitting else EXIT_CODES[NO]


def _as_dict(found: Verdict) -> dict[str, Any]:
    kept = {key: value for key, value in vars(found).items() if key != "forecast"}
    memory = found.forecast.memory
    return kept | {
        "seq_len": found.forecast.run["seq_len"],
        "ranks": found.forecast.run["ranks"],
        "peak_bytes": memory.peak.num_bytes,
        "peak_parts": memory.peak.parts,
        "step_s": found.forecast.time.seconds,
    }


def _lever_dict(lever: Lever) -> dict[str, Any]:
    plain = asdict(lever, dict_factory=dict)
    plain.pop("found")
    return plain | {"overrides": lever.overrides, "answer": lever.found.answer}
