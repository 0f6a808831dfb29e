"""Safetensors folders read one tensor at a time, by plain reads.

The library's memory map counts every touched page of the file as this process's memory, and a mapped 16 GB file hides
whether a rank held the whole model; a plain read needs exactly the tensor. Headers alone give every name, shape and
type, so a folder is judged before any tensor is read. Format: huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from stack.errors import ModelError
from stack.models.hub import INDEX, SINGLE

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights that can be trained from. Integers and 8-bit floats are quantised weights."""

_HEADER_LIMIT_BYTES = 100_000_000


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the file's beginning."""

    def read(self) -> Tensor:
        """The tensor, on the CPU, in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def read_into(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor on the CPU, of this type and number of elements."""
        if tensor.numel() == 0:
            return
        buffer = tensor.view(-1).view(torch.uint8).numpy().data
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.offset)
            done = 0
            while done < len(buffer):
                # One call returns at most 2 GiB on Linux.
                count = stream.readinto(buffer[done:])
                if not count:
                    raise ModelError(f"{self.file} ends before the tensor does: the file is truncated")
                done += count

    def like(self) -> Tensor:
        """A tensor of the same shape and type without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def read_headers(folder: Path) -> dict[str, Entry]:
    """Every tensor in the folder's `model.safetensors`, or in the shards that its index names.

    Raises ModelError for a missing, truncated or quantised file, and for an index that disagrees with its shards.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        files = sorted(set(weight_map.values()))
    elif (folder / SINGLE).is_file():
        weight_map, files = {}, [SINGLE]
    else:
        raise ModelError(_no_weights_message(folder))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: its index names files that are not there: {', '.join(missing)}")
    entries: dict[str, Entry] = {}
    for name in files:
        entries.update(_read_header(folder / name))
    lost = sorted(set(weight_map) - set(entries))
    if lost:
        raise ModelError(f"{index} names tensors that its files do not hold: {', '.join(lost[:10])}")
    return entries


def _no_weights_message(folder: Path) -> str:
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = (
        f"It holds {', '.join(others[:3])}: load that with transformers and save_pretrained it to get safetensors"
        if others
        else "Give the folder that holds the weights, or train from scratch with model.init=scratch"
    )
    return f"{folder} has neither {SINGLE} nor {INDEX}. {hint}"


def _read_header(file: Path) -> dict[str, Entry]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_HEADER_LIMIT_BYTES, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
    except ValueError as error:
        raise ModelError(f"{file} is not a safetensors file, or only part of one: {error}") from error
    header.pop("__metadata__", None)
    entries = {}
    for name, facts in header.items():
        if facts["dtype"] not in DTYPES:
            raise ModelError(f"{file}: {name} is {facts['dtype']}: quantised weights cannot be trained")
        begin, end = facts["data_offsets"]
        dtype, shape = DTYPES[facts["dtype"]], tuple(facts["shape"])
        if end - begin != prod(shape) * dtype.itemsize:
            raise ModelError(
                f"{file}: {name} has {end - begin} bytes for shape {list(shape)} of {facts['dtype']}"
            )
        if 8 + length + end > size:
            raise ModelError(f"{file} is truncated: {size} bytes, but {name} ends at {8 + length + end}")
        entries[name] = Entry(file, dtype, shape, 8 + length + begin)
    return entries
