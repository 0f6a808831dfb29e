"""What the settings of a source mean together, for the data section and for each part of a mixture."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterator
from pathlib import Path

from stack.config.schema_data import DataConfig, MixturePart
from stack.errors import Fault

FILES = {"text": "text files", "jsonl": "JSONL files", "parquet": "Parquet files", "tokens": ".bin files"}
"""Sources that read files of their own, and what they are called."""

WITHOUT_TEXT = {"random", "tokens"}
"""Sources of ids, which need no tokenizer."""


def data_faults(data: DataConfig) -> Iterator[Fault]:
    """Contradictions between a source and its settings."""
    if data.mixture:
        for part in data.mixture:
            own = part.source is None and part.path is None
            path = data.path if own else part.path
            yield from _path_faults(part.source or data.source, path, f"data.mixture.{part.name}.path")
            yield from _hub_faults(part.source or data.source, part, f"data.mixture.{part.name}")
    else:
        yield from _path_faults(data.source, data.path, "data.path")
        yield from _hub_faults(data.source, data, "data")
    if data.token_eos is not None and "tokens" not in sources_of(data):
        want = "null for sources other than tokens, whose documents end by themselves"
        yield Fault("data.token_eos", data.token_eos, want, "data.token_eos=null, or data=tokens")
    tokens = data.micro_batch * data.seq_len
    if tokens >= 2**31:
        want = f"fewer than 2^31 tokens in a micro-batch, whose boundaries are 32-bit (now {tokens})"
        fix = "use engine.accumulation for a larger batch"
        yield Fault("data.micro_batch", data.micro_batch, want, fix)


def sources_of(data: DataConfig) -> set[str]:
    """Every source that the settings read."""
    return {part.source or data.source for part in data.mixture} or {data.source}


def _path_faults(source: str, path: str | None, key: str) -> Iterator[Fault]:
    if source in FILES:
        kind = FILES[source]
        if not path:
            want = f"a file, folder or pattern of {kind} for data.source={source}"
            yield Fault(key, path, want, f"{key}=FOLDER")
        elif not _any_file(Path(path).expanduser()):
            want = f"{kind} that exist, seen from {Path.cwd()}"
            yield Fault(key, path, want, "check the path; quote patterns")
    elif source == "hf":
        if not path:
            want = "the name of a dataset on the hub, or a folder, for data.source=hf"
            yield Fault(key, path, want, f"{key}=NAME")
    elif path is not None:
        want = f"no path, since data.source={source} reads none"
        yield Fault(key, path, want, f"data=text or data=jsonl, or {key}=null")


def _hub_faults(source: str, given: DataConfig | MixturePart, key: str) -> Iterator[Fault]:
    for name in ("subset", "revision"):
        value = getattr(given, name)
        if value is not None and source != "hf":
            want = f"null for source={source}: only datasets of Hugging Face have a {name}"
            yield Fault(f"{key}.{name}", value, want, f"{key}.{name}=null, or data=hf")
    if source == "hf" and given.revision is not None and Path(given.path or "").expanduser().is_dir():
        want = f"null for the local folder {given.path}, which has no commits"
        yield Fault(f"{key}.revision", given.revision, want, f"{key}.revision=null")


def _any_file(path: Path) -> bool:
    """A name that exists as it stands may hold what a pattern would take for a wildcard. Below `**` nothing is looked for
    here: it could be all of a large file system."""
    fixed = Path(*itertools.takewhile(lambda part: part != "**", path.parts))
    return path.exists() or next(glob.iglob(str(fixed)), None) is not None
