"""What kept activations take on the host: the formula against real runs, real stores, and torch's page-locked memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import stack.bench.one_process as one_process
from stack.bench.exact import as_forecast
from stack.bench.live_bytes import LiveBytes
from stack.bench.step_count import Most, StepCount
from stack.config.compose import compose_config
from stack.config.kept import ALIGN, PAGE, SLAB, HostBytes, host_bytes, layer_tensors, page_locked
from stack.config.schema import RunConfig
from stack.data.batch import MicroBatch
from stack.dist.topology import Topology
from stack.methods import build_method
from stack.models.build import DTYPES, fill_model, prepare_model
from stack.ops import host_store, spill_file
from stack.ops.host_store import HostStore
from stack.parallel.apply import apply_parallelism
from stack.plan.forecast import KEPT
from stack.plan.shape import read_shape

SMALL = [
    *("model=bench", "model.architecture.num_hidden_layers=3", "data=random", "engine=zero3", "site=cpu"),
    *("model.architecture.hidden_size=64", "model.architecture.intermediate_size=64"),
    *("model.architecture.num_attention_heads=4", "model.architecture.num_key_value_heads=2"),
    *("model.architecture.vocab_size=320", "schedule.steps=1", "data.seq_len=301"),
    "memory.mlp_tile=64",
]
PACKED = ["data.random_document_tokens=70", "data.micro_batch=2", "engine.accumulation=2"]
FP32 = ["engine.precision=fp32"]
RUNS = {
    name: [*SMALL, *given]
    for name, given in {
        "lean, bf16, a row": ["memory=lean"],
        "lean, fp32, packed": ["memory=lean", *FP32, *PACKED],
        "checkpoint, bf16, packed": ["memory=checkpoint", "memory.offload=true", *PACKED],
        "checkpoint, fp32, a row": ["memory=checkpoint", "memory.offload=true", *FP32],
        "alst, bf16, packed": ["memory=alst", *PACKED],
        "alst, fp32, a row": ["memory=alst", *FP32],
    }.items()
}
"""Packed: two rows of documents in each of two micro-batches."""

PINNED = ["memory=lean", "memory.pin_memory=true"]


def configured(*overrides: str) -> RunConfig:
    return compose_config([*SMALL, *overrides], strict=False)


def by_formula(cfg: RunConfig, on_gpu: bool = False) -> HostBytes:
    return host_bytes(cfg, read_shape(cfg.model), cfg.memory.lean, on_gpu)


def held(cfg: RunConfig) -> int:
    """Most bytes in the host buffers of a real step, counted where they are made."""
    blank = prepare_model(cfg.model, cfg.data.seq_len, DTYPES[cfg.engine.precision], cfg.seed)
    built = fill_model(blank, None)
    topology = Topology(0, 1, 1, 1, 0, 0, torch.device("cpu"), None, None)
    with LiveBytes() as live:
        apply_parallelism(built.model, built.spec, cfg.memory, cfg.model.attention, 0, topology)
        for _ in range(cfg.engine.accumulation):
            loss = build_method(cfg.method).loss(built.model, batch_of(cfg), 1.0)
            loss.backward()
    assert loss.isfinite() and all(param.grad is not None for param in built.model.parameters())
    return live.peak_host


def batch_of(cfg: RunConfig) -> MicroBatch:
    """Rows of documents of data.random_document_tokens, else of one document each."""
    rows, seq = cfg.data.micro_batch, cfg.data.seq_len
    ids = torch.randint(0, 320, (rows, seq), generator=torch.Generator().manual_seed(0))
    starts = [
        row * seq + start
        for row in range(rows)
        for start in range(0, seq, cfg.data.random_document_tokens or seq)
    ]
    bounds = torch.tensor([*starts, rows * seq], dtype=torch.int32)
    return MicroBatch(ids, ids, torch.arange(seq).repeat(rows, 1), bounds, (seq,) * rows)


@pytest.mark.parametrize("name", RUNS)
def test_the_formula_gives_what_a_run_keeps(name: str) -> None:
    cfg = compose_config(RUNS[name], strict=False)
    found = by_formula(cfg)
    assert found == HostBytes(held(cfg), 0, found.layer)
    assert (found.layer > 0) == cfg.memory.lean


def filled(cfg: RunConfig, store: HostStore) -> HostStore:
    """The store behind a forward, with empty tensors in place of a model's."""
    shape = read_shape(cfg.model)
    for _ in range(shape.num_layers):
        tensors = layer_tensors(cfg, shape, lean=True)
        store.keep([torch.empty(num_bytes, dtype=torch.uint8) for num_bytes in tensors])
    return store


@pytest.mark.parametrize("tokens", [301, 120_001])
def test_lean_layers_take_whole_slabs(tokens: int) -> None:
    cfg = configured("memory=lean", f"data.seq_len={tokens}")
    found = filled(cfg, HostStore(True, pin_memory=False))
    assert found.used == by_formula(cfg).in_memory
    assert (found.slab == SLAB) == (tokens == 120_001) and by_formula(cfg).layer >= found.slab


@pytest.mark.parametrize("layers", [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 5.9, 6.0, 7.0, 40.0])
def test_a_bound_leaves_whole_layers_in_memory_and_the_rest_in_the_file(
    layers: float, tmp_path: Path
) -> None:
    cfg = configured("memory=lean", "model.architecture.num_hidden_layers=6")
    shape, spill = read_shape(cfg.model), spill_file.SpillFile(tmp_path)
    layer = host_store.PAGE * -(-sum(layer_tensors(cfg, shape, lean=True)) // host_store.PAGE)
    memory = replace(cfg.memory, spill_folder=str(tmp_path), host_gib=layers * layer / 2**30)
    cfg = replace(cfg, memory=memory)
    store = filled(cfg, HostStore(True, False, spill, int(layers * layer)))
    assert by_formula(cfg) == HostBytes(store.used, spill._end, layer)


def test_page_locked_memory_is_rounded_up_to_a_power_of_two() -> None:
    """Each buffer by itself: a checkpoint's, and a slab where a layer is smaller than 16 MiB."""
    assert [page_locked(size) for size in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]
    alst, small = configured("memory=alst"), configured(*PINNED)
    assert by_formula(alst, on_gpu=True).in_memory == 3 * 2**16  # of 301 tokens x 64 x 2 bytes
    assert 2**16 < by_formula(small).layer < 2**17 == by_formula(small, on_gpu=True).layer
    large = configured(*PINNED, "data.seq_len=120001")
    assert by_formula(large, on_gpu=True) == by_formula(large)
    loose = configured("memory=alst", "memory.pin_memory=false")
    assert by_formula(loose, on_gpu=True) == by_formula(loose)


def test_numbers_that_the_formula_repeats() -> None:
    assert (SLAB, ALIGN, PAGE) == (host_store.SLAB, host_store.ALIGN, spill_file.PAGE)


def test_the_exact_count_is_rounded_and_bounded_by_the_formula(tmp_path: Path) -> None:
    """It is made without page-locked memory, a bound or a disk."""
    cfg = configured(*PINNED, "site=h100x8")
    counted = by_formula(cfg).in_memory
    assert told(cfg, counted) == (by_formula(cfg, on_gpu=True).in_memory, 0)
    bounded = replace(cfg.memory, spill_folder=str(tmp_path), host_gib=0.0002)
    bounded = replace(cfg, memory=bounded)
    there = by_formula(bounded, on_gpu=True)
    assert told(bounded, counted) == (there.in_memory, there.in_file) and there.in_file > 0
    assert told(configured(*PINNED), counted) == (counted, 0)  # CPU ranks lock no pages


def told(cfg: RunConfig, kept: int) -> tuple[int, int]:
    most = Most(1, {("MLP", "a.py:1"): 1})
    found = StepCount(most, {}, {"forward": most}, 0, 0, {KEPT: kept}, {}, {}, 0, 0, 1)
    host = as_forecast(cfg, 2, found, []).host
    return host.kept_bytes, host.spilled_bytes


@pytest.mark.parametrize(("site", "kernels", "norm"), [("cpu", "cpu", "none"), ("h100x8", "gpu", "torch")])
def test_a_count_takes_the_kernels_of_the_sites_device(
    site: str, kernels: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Asked(Exception): ...

    def install(name: str) -> None:
        asked.append(name)
        raise Asked

    monkeypatch.setattr(one_process, "install_kernels", install)
    monkeypatch.setattr(one_process, "os", SimpleNamespace(environ={}))
    cfg = one_process.countable(configured("memory=lean", f"site={site}"), 2)
    with pytest.raises(Asked):
        one_process.count_alone(cfg, 2, virtual=False)
    assert asked == [kernels] and cfg.memory.fused_kernels == norm
