"""The table `exact.json` counted anew: every row by `stack/bench/exact.py`, under the overrides that the row names.

    python -m tests.plan.recount                           all rows
    python -m tests.plan.recount qwen3_1m                  those of an experiment
    python -m tests.plan.recount qwen3_1m:alst ...         or of one memory preset

One count at a time, about a minute each; the file is written after each. What changed is told.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stack.bench.exact import count
from stack.config.compose import compose_config
from stack.config.derive import REPO_ROOT
from stack.plan.forecast import GIB

TABLE = REPO_ROOT / "tests" / "plan" / "exact.json"
MADE_BY = "python -m tests.plan.recount"


def recounted(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the numbers of today. Bytes; phases of a warm step, on one rank."""
    overrides = [f"+exp={row['exp']}", f"memory={row['memory']}", *row["overrides"]]
    found = count(compose_config(overrides, strict=False), row["ranks"], "all", tell=lambda text: None)
    phases = {name: peak.num_bytes for name, peak in found.memory.phases.items() if name != "init"}
    numbers = {
        "phases": phases,
        "host_bytes": found.host.kept_bytes,
        "communication": dict(found.communication),
    }
    return row | {"count": "stack/bench/exact.py"} | numbers


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each number that changed."""
    lines = []
    for kind in ("phases", "communication"):
        for name in dict.fromkeys([*before.get(kind, {}), *after[kind]]):
            old, new = before.get(kind, {}).get(name, 0), after[kind].get(name, 0)
            if old != new:
                lines.append(_line(name, old, new))
    if before.get("host_bytes") != after["host_bytes"]:
        lines.append(_line("host", before.get("host_bytes", 0), after["host_bytes"]))
    return lines


def _line(name: str, old: int, new: int) -> str:
    share = f" ({new / old - 1:+.3%})" if old else ""
    return f"  {name}: {old:,} -> {new:,} bytes, {(new - old) / GIB:+.4f} GiB{share}"


def written(rows: Sequence[dict[str, Any]]) -> str:
    """The file's text: one row a line."""
    return (
        f'{{\n"made_by": [\n {json.dumps(MADE_BY)}\n],\n"rows": [\n'
        + ",\n".join(json.dumps(row) for row in rows)
        + "\n]\n}\n"
    )


def recount(asked: Sequence[str], table: Path = TABLE) -> int:
    """Count the rows that are asked for, all where none are. Returns how many changed. Raises ValueError for a row that
    is not there."""
    rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
    names = {f"{row['exp']}:{row['memory']}" for row in rows} | {row["exp"] for row in rows}
    if unknown := sorted(set(asked) - names):
        raise ValueError(f"{', '.join(unknown)}: no row of {table}; it has {', '.join(sorted(names))}")
    changed = 0
    for place, row in enumerate(rows):
        name = f"{row['exp']}:{row['memory']}"
        if asked and name not in asked and row["exp"] not in asked:
            continue
        after = recounted(row)
        lines = differences(row, after)
        changed += bool(lines)
        print("\n".join([f"{name}: {'changed' if lines else 'the same'}", *lines]), flush=True)
        rows[place] = after
        table.write_text(written(rows), encoding="utf-8")
    return changed


if __name__ == "__main__":
    print(f"{recount(sys.argv[1:])} rows changed")
