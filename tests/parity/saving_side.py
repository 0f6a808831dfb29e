"""What each rank runs for the tests of checkpoints on disk: DeepSpeed's real states, through the real saver."""

from __future__ import annotations

import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import torch

import stack.checkpoint.save as save_module
import stack.checkpoint.writer as writer
from stack.checkpoint.publish import Origin
from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState
from stack.config.schema_checkpoint import CheckpointConfig
from stack.dist.topology import Topology
from stack.engine.handle import Engine
from stack.errors import CheckpointError
from tests.parity.cases import ParityCase
from tests.parity.rank_side import assemble, config_of
from tests.parity.reference import make_steps
from tests.parity.steps_side import DTYPES, one_step, topology_of

LAYOUT_OF = {"dp2": 1, "sp2": 2}


def make_engine(
    model: str, stage: int, layout: str = "dp2", precision: str = "fp32"
) -> tuple[Topology, Engine]:
    topology = topology_of(LAYOUT_OF[layout])
    cfg = config_of(ParityCase(layout, stage, 1, "none", False, ""), model, precision)
    cfg = replace(cfg, optim=replace(cfg.optim, name="adamw"))
    return topology, assemble(cfg, topology, DTYPES[precision])


def make_saver(folder: str, topology: Topology, stage: int, told: list[str], **policy) -> Saver:
    origin = Origin("mine", {"world": topology.world, "sp": topology.sp, "stage": stage}, 9)
    return Saver(Path(folder), topology, origin, CheckpointConfig(**policy), told.append)


def twins(model: str, folder: str, stage: int, layout: str, precision: str) -> int:
    """The same states saved by DeepSpeed's own writer, at once and behind two steps; then the states once more, when
    host buffers are used again. Returns how many new host buffers the second copy took."""
    topology, engine = make_engine(model, stage, layout, precision)
    text = make_steps("one document")
    one_step(engine, topology, text[0], 0.1)
    engine._engine.checkpoint_engine = engine._collector._inner  # what DeepSpeed itself writes with
    engine._engine.save_checkpoint(
        folder, tag="deepspeed", client_state={"train_state": {"step": 1}}, save_latest=False
    )
    engine._engine.checkpoint_engine = engine._collector
    real, gate = writer.write_chunk, threading.Event()

    def write_behind_the_gate(descriptor: int, chunk: memoryview) -> None:
        assert gate.wait(60)
        real(descriptor, chunk)

    writer.write_chunk = write_behind_the_gate
    for name, asynchronous in (("sync", False), ("async", True)):
        saver = make_saver(f"{folder}/{name}", topology, stage, [], asynchronous=asynchronous)
        if not asynchronous:
            gate.set()
        saver.save(engine, TrainState(step=1))
        if asynchronous:
            one_step(engine, topology, text[1], 0.1)
            one_step(engine, topology, text[2], 0.1)
            gate.set()
        saver.close()
        gate.clear()
    writer.write_chunk = real
    before = [buffer.data_ptr() for buffer in engine._copies._buffers]
    saver.save(engine, TrainState(step=3))
    saver.close()
    engine.close()
    return sum(buffer.data_ptr() not in before for buffer in engine._copies._buffers)


def two_checkpoints(model: str, folder: str, foreign: str) -> None:
    """Steps 1 and 2 of one run, and step 2 of another."""
    topology, engine = make_engine(model, 3)
    text = make_steps("one document")
    saver = make_saver(folder, topology, 3, [])
    torch.manual_seed(topology.rank)
    for step in (1, 2):
        torch.rand(())  # so that no two files of random states are alike
        one_step(engine, topology, text[step], 0.1)
        saver.save(engine, TrainState(step=step))
        saver.wait()
    other = make_saver(foreign, topology, 3, [])
    other.origin.run = "theirs"
    one_step(engine, topology, text[0], 0.1)
    other.save(engine, TrainState(step=2))
    other.close()
    engine.close()


def bad_disks(model: str, folder: str) -> tuple[list[str], list[list[str]]]:
    """A small disk that is filled, then read-only, then well again. Returns what was told on rank 0, and which folders were
    there after each save."""
    topology, engine = make_engine(model, 3)
    told: list[str] = []
    seen: list[list[str]] = []
    saver = make_saver(folder, topology, 3, told, keep=1, max_failures=2)
    filler = Path(folder).parent / "filler"
    text = make_steps("one document")

    def on_main(action) -> None:
        if topology.is_main:
            action()
        topology.barrier()

    def fill(leave: int) -> None:
        filler.write_bytes(b"")
        filler.write_bytes(bytes(shutil.disk_usage(folder).free - leave))

    def mount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(filler.parent)], check=True)

    def save(step: int) -> None:
        one_step(engine, topology, text[0], 0.1)
        saver.save(engine, TrainState(step=step))
        saver._settle()
        topology.barrier()
        seen.append(sorted(path.name for path in Path(folder).iterdir()))
        topology.barrier()

    save(1)
    on_main(lambda: fill(leave=300_000))
    save(2)  # found before a byte is written
    real, save_module.tensor_bytes, save_module.HEADERS_BYTES = (
        save_module.tensor_bytes,
        lambda contents: 0,
        0,
    )
    save(3)  # the disk fills while it is written
    try:
        save(4)
    except CheckpointError as error:
        told.append(f"ended on rank {topology.rank}: {error}")
    save_module.tensor_bytes = real
    on_main(lambda: mount("ro"))
    saver._failures = 0
    save(5)
    try:
        saver.close()
    except CheckpointError as error:
        told.append(f"last on rank {topology.rank}: {error}")
    on_main(lambda: mount("rw"))
    on_main(filler.unlink)
    save(6)
    saver.close()
    engine.close()
    return told, seen
