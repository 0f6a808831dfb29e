"""Reads the files that W&B leaves in offline mode: LevelDB log blocks of protocol buffers."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768  # LevelDB's log format: records are cut at the ends of blocks of this size
FILE_HEADER, RECORD_HEADER = (
    7,
    7,
)  # W&B's mark; checksum (4 bytes), length (2), kind (1: whole, 2-4: first, middle, last)


def offline_runs(run_folder: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Of each offline run below `run_folder`, oldest first: its id and its history, one dict a logged step."""
    found = []
    for path in sorted((run_folder / "wandb").glob("offline-run-*/run-*.wandb")):
        history, run_id = [], ""
        for record in _records(path.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                history.append(
                    {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
                )
        found.append((run_id, history))
    return found


def _records(data: bytes) -> Iterator[Any]:
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    place, parts = FILE_HEADER, b""
    while place + RECORD_HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < RECORD_HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += RECORD_HEADER
        parts += data[place : place + length]
        place += length
        if kind in (1, 4):
            record = protocol.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
