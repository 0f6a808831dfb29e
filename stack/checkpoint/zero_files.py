"""The tensors of a checkpoint, read straight from DeepSpeed's files: any range of any parameter, without an engine or ranks.

The files are torch archives in which tensors lie uncompressed. They are opened on the meta device, which reads names,
shapes and places but no tensor; ranges are then read by plain reads, so that memory is what is asked for. Where fp32
weights and optimizer states lie, by ZeRO stage:

| 0 | each parameter whole, in the one model file |
| 1, 2 | a vector for each parameter group, cut into one part a rank, wherever the cut falls |
| 3 | each parameter cut into one part a rank, the last one padded; a rank's parts of a group make a vector |
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stack.checkpoint.manifest import Manifest
from stack.errors import CheckpointError
from stack.models.safetensors_file import Entry

WEIGHT = "weight"
"""Key of the weights: fp32 masters, and frozen parameters as they are. Optimizer states go by torch's keys."""
CHUNK = 2**22
"""Elements read at once: 16 MiB of fp32 beside the tensor that is filled."""
PREFIX = "model."
"""What the module around the model (`engine/module.py`) puts before each name."""


@dataclass(frozen=True)
class _Place:
    """Elements of a flattened parameter from `start` on are those of a vector from `offset` on."""

    start: int
    numel: int
    vector: Hashable
    offset: int


@dataclass(frozen=True)
class SavedEntry(Entry):
    """A whole parameter, as the readers of safetensors folders take it."""

    files: ZeroFiles
    name: str

    def read(self) -> Tensor:
        return self.files.whole(self.name, self.dtype)


class ZeroFiles:
    """A complete checkpoint. Raises CheckpointError where its files are not laid out as DeepSpeed 0.19 does it."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Parameter -> full shape, in the model's order, tied ones once."""
        self.states: set[str] = set()
        """Keys of the optimizer's states, such as exp_avg."""
        self.step = 0.0
        """Updates that the optimizer has counted."""
        self.lr = 0.0
        """Learning rate of the newest of them."""
        self.loss_scaler: Any = None
        """DeepSpeed's, of a 16-bit run."""
        self._places: dict[str, list[_Place]] = {}
        self._vectors: dict[tuple[str, Hashable], Entry] = {}
        self._buffers: dict[torch.dtype, Tensor] = {}
        stage, world = manifest.layout["stage"], manifest.layout["world"]
        try:
            model = self._open(_model_name(stage, 0))
            self.client_state = {key: value for key, value in model.items() if key != "module"}
            trained = self._take_shapes(model, manifest)
            if stage == 0:
                self._take_stage_0(model, trained)
            for rank in range(world if stage else 0):
                self._take_rank(rank, stage, model, trained)
            self._take_frozen(model, trained, stage, world)
        except (KeyError, IndexError, AttributeError, TypeError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{folder} cannot be read parameter by parameter: {error!r}") from error
        self._check()

    def read(self, name: str, key: str, start: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[numel]: elements of the flattened parameter, of its weights or of an optimizer state."""
        found = torch.empty(numel, dtype=dtype)
        for place in self._places[name]:
            entry = self._vectors[key, place.vector]
            end = min(start + numel, place.start + place.numel)
            for begin in range(max(start, place.start), end, CHUNK):
                count = min(CHUNK, end - begin)
                offset = entry.offset + (place.offset + begin - place.start) * entry.dtype.itemsize
                part = replace(entry, shape=(count,), offset=offset)
                target = found[begin - start : begin - start + count]
                if entry.dtype == dtype:
                    part.read_into(target)
                else:
                    buffer = self._buffer(entry.dtype)[:count]
                    part.read_into(buffer)
                    target.copy_(buffer)
        return found

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        # One for all reads: fresh ones would leave holes in the heap, a third of a small model's size.
        return self._buffers.setdefault(dtype, torch.empty(0, dtype=dtype)).resize_(CHUNK)

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weights of a parameter in its shape."""
        shape = self.shapes[name]
        return self.read(name, WEIGHT, 0, math.prod(shape), dtype).view(shape)

    def entries(self, dtype: torch.dtype) -> dict[str, Entry]:
        """All parameters, to build a model from."""
        return {
            name: SavedEntry(self.folder, dtype, shape, 0, self, name) for name, shape in self.shapes.items()
        }

    def _open(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder / name, map_location="meta", weights_only=False)

    def _take_shapes(self, model: dict[str, Any], manifest: Manifest) -> list[str]:
        """Fills `shapes`; returns the trained parameters, for stage 0 in the order of the optimizer."""
        given = [*(model["param_shapes"] or ()), model["frozen_param_shapes"] or {}]
        full = {name: tuple(shape) for shapes in given for name, shape in shapes.items()}
        tied = set(model["shared_params"] or ())
        first: dict[int, str] = {}
        canonical = {}
        for name, tensor in model["module"].items():
            if name in tied:
                continue
            if not full:  # stage 0 does not name tied parameters: they are one stored tensor
                canonical[name] = first.setdefault(_place_in_file(tensor), name)
                if canonical[name] != name:
                    continue
            self.shapes[_plain(name)] = full.get(name, tuple(tensor.shape))
        if full:
            return [_plain(name) for shapes in model["param_shapes"] for name in shapes]
        patterns = manifest.settings.get("model", {}).get("freeze", ())
        frozen = {
            _plain(kept)
            for name, kept in canonical.items()
            if any(fnmatchcase(_plain(name), each) for each in patterns)
        }
        # Matrices come first: `engine/build.py` puts what decays into the first group.
        free = [name for name in self.shapes if name not in frozen]
        return sorted(free, key=lambda name: len(self.shapes[name]) < 2)

    def _take_stage_0(self, model: dict[str, Any], trained: list[str]) -> None:
        optimizer, file = model["optimizer"], _model_name(0, 0)
        base = optimizer.get("optimizer_state_dict", optimizer)
        self.lr, states = base["param_groups"][0]["lr"], base["state"]
        masters = [tensor for group in optimizer.get("fp32_groups", ()) for tensor in group]
        for index, name in enumerate(trained):
            master = masters[index] if masters else model["module"][PREFIX + name]
            self._take_vector(name, file, master, states.get(index, {}))
            self._places[name] = [_Place(0, master.numel(), name, 0)]

    def _take_rank(self, rank: int, stage: int, model: dict[str, Any], trained: list[str]) -> None:
        (file,) = self.folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        saved = self._open(file.name)["optimizer_state_dict"]
        self.loss_scaler = saved.get("loss_scaler")
        masters = saved["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        base = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        self.lr, states = base["param_groups"][0]["lr"], base["state"]
        for group, master in enumerate(masters):
            self._take_vector((rank, group), file.name, master, states.get(group, {}))
            if stage == 3:
                shapes = model["param_shapes"][group]
                parts = [
                    (name, -(-math.prod(shape) // saved["partition_count"])) for name, shape in shapes.items()
                ]
                self._place_in_turn(parts, rank, group)
                if sum(numel for _, numel in parts) != master.numel():
                    raise CheckpointError(
                        f"{file} holds {master.numel()} elements of parameter group {group} where its parameters have "
                        "more: an older version left optimizer states on NVMe out. Fix: begin a new run from exported "
                        "weights: name=NEW_NAME checkpoint.weights_from=FOLDER"
                    )
            else:
                for name, part in saved["param_slice_mappings"][group].items():
                    self._place(_plain(name), part.numel, (rank, group), part.start)

    def _place_in_turn(self, parts: Iterable[tuple[str, int]], rank: int, group: int) -> None:
        offset = 0
        for name, numel in parts:
            left = math.prod(self.shapes[_plain(name)]) - rank * numel
            self._place(_plain(name), max(0, min(numel, left)), (rank, group), offset)
            offset += numel

    def _place(self, name: str, numel: int, vector: Hashable, offset: int) -> None:
        """The next elements of `name`; ranks come in order."""
        places = self._places.setdefault(name, [])
        places.append(_Place(sum(place.numel for place in places), numel, vector, offset))

    def _take_frozen(self, model: dict[str, Any], trained: list[str], stage: int, world: int) -> None:
        frozen = set(self.shapes) - set(trained)
        for rank in range(world if stage == 3 and frozen else 0):
            file = _model_name(3, rank)
            fragments = self._open(file)["frozen_param_fragments"]
            for name in frozen:
                self._take_vector((rank, name), file, fragments[PREFIX + name], {})
                numel = fragments[PREFIX + name].numel()
                left = math.prod(self.shapes[name]) - rank * numel
                self._place(name, max(0, min(numel, left)), (rank, name), 0)
        for name in frozen if stage < 3 else ():
            tensor = model["module"][PREFIX + name]
            self._take_vector(name, _model_name(stage, 0), tensor, {})
            self._places[name] = [_Place(0, tensor.numel(), name, 0)]

    def _take_vector(self, vector: Hashable, file: str, master: Tensor, states: dict[str, Any]) -> None:
        self._vectors[WEIGHT, vector] = self._entry(file, master)
        for key, value in states.items():
            if key == "step":
                self.step = float(self._entry(file, value).read() if isinstance(value, Tensor) else value)
            elif (
                isinstance(value, Tensor) and value.numel() >= master.numel()
            ):  # with its padding at ZeRO-1 and 2
                self.states.add(key)
                self._vectors[key, vector] = self._entry(file, value)

    def _entry(self, file: str, tensor: Tensor) -> Entry:
        if not tensor.is_contiguous():
            raise CheckpointError(f"{self.folder / file} holds a tensor that is not contiguous")
        return Entry(self.folder / file, tensor.dtype, (tensor.numel(),), _place_in_file(tensor))

    def _check(self) -> None:
        for name, shape in self.shapes.items():
            found = sum(place.numel for place in self._places.get(name, ()))
            if found != math.prod(shape):
                raise CheckpointError(
                    f"{self.folder} holds {found} elements of {name}, whose shape is {list(shape)}"
                )


def _model_name(stage: int, rank: int) -> str:
    return f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt"


def _plain(name: str) -> str:
    return name.removeprefix(PREFIX)


def _place_in_file(tensor: Tensor) -> int:
    """Bytes from the file's beginning, which torch notes for tensors loaded to meta."""
    storage: Any = tensor.untyped_storage()
    return storage._checkpoint_offset + tensor.storage_offset() * tensor.element_size()
