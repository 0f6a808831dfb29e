"""What each rank runs for the tests of checkpoints that are cut anew: save under one shape, go on under another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stack.checkpoint.manifest import Manifest
from stack.checkpoint.zero_files import WEIGHT, ZeroFiles
from stack.config.schema import ParallelConfig, RunConfig
from stack.dist.topology import Topology
from stack.engine.handle import Engine
from tests.disk_io import SMALLEST, use_plain_io
from tests.parity.cases import ParityCase
from tests.parity.rank_side import assemble, config_of, save_now, weights_of
from tests.parity.reference import make_steps
from tests.parity.steps_side import DTYPES, one_step, topology_of

FROZEN = ["*input_layernorm*"]
LR = 0.01


@dataclass(frozen=True)
class Shape:
    """How a run is laid out. world: ranks."""

    world: int
    sp: int
    stage: int
    precision: str
    disk: str = ""
    """Optimizer states on a disk: `nvme`, or `pipeline` for reads and writes behind the updates."""

    @property
    def name(self) -> str:
        return (
            f"{self.world}-ranks-sp{self.sp}-zero{self.stage}-{self.precision}{self.disk and f'-{self.disk}'}"
        )

    def config(self, folder: str) -> RunConfig:
        cfg = config_of(ParityCase("1", self.stage, 1, "none", True, ""), folder, self.precision)
        # With a large eps the updates do not turn rounding of vanishing gradients into signs.
        optim = replace(cfg.optim, name="adamw", lr=LR, weight_decay=0.1, eps=1e-3)
        model, data = replace(cfg.model, freeze=FROZEN), replace(cfg.data, micro_batch=1)
        cfg = replace(cfg, optim=optim, model=model, data=data, parallel=ParallelConfig(sp=self.sp))
        return self._with_states_on_disk(cfg, f"{folder}-nvme") if self.disk else cfg

    def _with_states_on_disk(self, cfg: RunConfig, disk: str) -> RunConfig:
        use_plain_io()
        pipeline = self.disk == "pipeline"
        offload = {"buffer_count": 12, "pipeline_read": pipeline, "pipeline_write": pipeline}
        # Many groups, most of them above 1 KiB; those of norms stay in memory.
        zero = {"sub_group_size": 2000, "offload_optimizer": offload}
        overrides = {"zero_optimization": zero, "aio": {"block_size": SMALLEST}}
        engine = replace(cfg.engine, offload_optimizer="nvme", nvme_path=disk, overrides=overrides)
        return replace(cfg, engine=engine)

    def manifest(self) -> Manifest:
        layout = {"stage": self.stage, "world": self.world}
        return Manifest(2, layout, 4, {}, {}, settings={"model": {"freeze": FROZEN}})


@dataclass
class Seen:
    """Losses of the two steps behind the checkpoint, and what the files hold (rank 0)."""

    losses: list[float]
    weights: dict[str, Tensor]
    stored: dict[tuple[str, str], Tensor]
    step: float
    lr: float


def go_on(engine: Engine, topology: Topology) -> list[float]:
    return [one_step(engine, topology, rows, LR).loss for rows in make_steps("packed")[2:4]]


def stored_in(files: ZeroFiles) -> dict[tuple[str, str], Tensor]:
    """Every stored value by parameter and key."""
    found = {(name, WEIGHT): files.whole(name, torch.float32) for name in files.shapes}
    for name, shape in files.shapes.items():
        if "input_layernorm" not in name:
            for key in files.states:
                found[name, key] = files.read(name, key, 0, torch.Size(shape).numel())
    return found


def save_and_go_on(folder: str, out: str, shapes: list[Shape]) -> dict[str, Seen]:
    """Two steps, a checkpoint, and the two steps behind it in the unbroken run."""
    found = {}
    for shape in shapes:
        topology = topology_of(shape.sp)
        engine = assemble(shape.config(folder), topology, DTYPES[shape.precision])
        for rows in make_steps("packed")[:2]:
            one_step(engine, topology, rows, LR)
        save_now(engine, Path(out), shape.name, {"step": 2})
        check_disk(engine, shape)
        found[shape.name] = look(engine, topology, ZeroFiles(Path(out) / shape.name, shape.manifest()))
        close(engine, topology, f"{folder}-nvme")
    return found


def fill_and_go_on(
    folder: str, out: str, pairs: list[tuple[Shape, Shape]], with_states: bool = True
) -> dict[tuple[str, str], Seen]:
    """The checkpoints of the first shape under the second, saved again at once, and two steps more."""
    found = {}
    for source, target in pairs:
        topology = topology_of(target.sp)
        engine = assemble(target.config(folder), topology, DTYPES[target.precision])
        one_step(engine, topology, make_steps("packed")[0], 3 * LR)  # a live engine, with states of its own
        engine.fill(ZeroFiles(Path(out) / source.name, source.manifest()), with_states)
        again = Path(out) / f"{source.name}-to-{target.name}"
        save_now(engine, again.parent, again.name, {"step": 2}, to_host=target.disk == "pipeline")
        check_disk(engine, target)
        found[source.name, target.name] = look(engine, topology, ZeroFiles(again, target.manifest()))
        close(engine, topology, f"{folder}-nvme")
    return found


def close(engine: Engine, topology: Topology, disk: str) -> None:
    engine.close()
    topology.barrier()
    assert not Path(disk).exists() or not list(Path(disk).iterdir())


def check_disk(engine: Engine, shape: Shape) -> None:
    """Weights and both moments of this rank's groups are on the disk, where they are to be."""
    if shape.disk:
        optimizer: Any = engine._engine.optimizer
        names = [file.name for file in Path(optimizer.optimizer_swapper.swap_folder).iterdir()]
        groups = [group.ds_id for group in optimizer.fp32_partitioned_groups_flat]
        on_disk = [group for group in groups if f"{group}.tensor.swp" in names]
        assert 1 < len(on_disk) < len(groups), "all groups, or one or none, are on the disk"
        wanted = [f"{key}-{group}.tensor.swp" for group in on_disk for key in ("exp_avg", "exp_avg_sq")]
        assert set(wanted) <= set(names)


def look(engine: Engine, topology: Topology, files: ZeroFiles) -> Seen:
    stored = stored_in(files) if topology.is_main else {}
    losses = go_on(engine, topology)
    weights = weights_of(engine)
    return Seen(losses, weights, stored, files.step, files.lr)
