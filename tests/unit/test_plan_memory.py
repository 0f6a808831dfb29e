"""The closed form against the exact count: all ready experiments with every memory preset, from a table; small shapes, live."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from stack.bench.live_bytes import LiveBytes
from stack.bench.step_count import StepCount
from stack.config.compose import CONF, compose_config
from stack.config.derive import REPO_ROOT
from stack.ops.param_grads import ParamGrads
from stack.plan.closed_form import plan
from stack.plan.forecast import GATHERED, PHASES, Forecast
from stack.plan.lean import Sums
from stack.plan.machine import read_machine
from stack.plan.operators import Capture, Operators
from stack.plan.tensors import INDEX, Ledger
from stack.plan.zero3 import Module, Param, Zero3, ZeroSettings
from tests.ranks import run_ranks

TABLE: list[dict[str, Any]] = json.loads((REPO_ROOT / "tests" / "plan" / "exact.json").read_text())["rows"]
PRESETS = ("plain", "checkpoint", "alst", "lean")
APART = 0.03
SMALL = [
    *(
        "model=bench",
        "model.architecture.num_hidden_layers=2",
        "data=random",
        "engine=zero3",
        "schedule.steps=1",
    ),
    *("data.seq_len=1536", "parallel.sp=2", "memory.mlp_tile=200", "memory.loss_tile=128"),
    # Where buckets are large beside everything else, there would be little to compare.
    "+engine.overrides.zero_optimization.reduce_bucket_size=200000",
]
EXPERTS = [
    *("model.architecture.model_type=qwen3_moe", "+model.architecture.num_experts=4"),
    *("+model.architecture.num_experts_per_tok=2", "+model.architecture.moe_intermediate_size=128"),
]
TIGHT = [
    "model.architecture.num_hidden_layers=3",
    *(
        f"+engine.overrides.zero_optimization.stage3_{name}={value}"
        for name, value in {
            "prefetch_bucket_size": 100_000,
            "param_persistence_threshold": 500,
            "max_reuse_distance": 400_000,
            "max_live_parameters": 1_500_000,
        }.items()
    ),
]
"""Parameters are fetched ahead, kept and let go as in a model that is large beside DeepSpeed's bounds."""
LIVE = {
    "plain": ["memory=plain"],
    "checkpoint": ["memory=checkpoint", "engine.accumulation=2"],
    "alst": ["memory=alst", "memory.fused_kernels=none"],
    "lean": ["memory=lean"],
    "lean, tied": ["memory=lean", "model.architecture.tie_word_embeddings=true", "memory.attention_heads=1"],
    "lean, experts": ["memory=lean", *EXPERTS],
    "checkpoint, tight": ["memory=checkpoint", *TIGHT],
    "checkpoint, experts, tight": ["memory=checkpoint", *EXPERTS, *TIGHT],
    "alst, experts, tight": ["memory=alst", *EXPERTS, *TIGHT],
}


def _planned(overrides: list[str], world: int) -> Forecast:
    cfg = compose_config(overrides, strict=False)
    return plan(cfg, world, read_machine(cfg.site))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['exp']}, {row['memory']}")
def test_ready_experiments_are_within_one_percent_in_every_phase(row: dict[str, Any]) -> None:
    found = _planned([f"+exp={row['exp']}", f"memory={row['memory']}", *row["overrides"]], row["ranks"])
    phases = {name: found.memory.phases[name].num_bytes for name in row["phases"]}
    assert phases == pytest.approx(row["phases"], rel=0.01)
    if not any("zero3" in text for text in row["overrides"]) and row["count"].endswith("exact.py"):
        assert found.host.kept_bytes == row["host_bytes"]
    for kind in ("all-to-all", "reduce-scatter"):
        if row["ranks"] > 1 and kind in row.get("communication", {}):
            assert found.communication[kind] == row["communication"][kind]


def test_a_million_tokens_of_8b_need_at_most_30_gib_of_each_of_8_gpus() -> None:
    found = _planned(["+exp=qwen3_1m", "data.seq_len=1048576"], 8)
    assert 16 * 8.19e9 / 8 < found.memory.peak.num_bytes <= 30 * 2**30


def test_the_table_has_each_preset_of_its_experiments() -> None:
    there = {(row["exp"], row["memory"]) for row in TABLE}
    experiments = {row["exp"] for row in TABLE}
    assert len(experiments) >= 9 and there == {(name, preset) for name in experiments for preset in PRESETS}


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF / "exp").glob("*.yaml")))
def test_every_experiment_can_be_planned(name: str) -> None:
    cfg = compose_config([f"+exp={name}", "site=h100x8"], strict=False)
    found = plan(cfg, cfg.parallel.sp, read_machine(cfg.site))
    assert list(found.memory.phases) == list(PHASES) and found.time.seconds > 0
    assert all(sum(peak.parts.values()) == peak.num_bytes > 0 for peak in found.memory.phases.values())


Events = list[tuple[str, list[int]]]
"""(`enter` a module, or `gather`, numbers of each parameter): of a warm step, without modules that have no parameters."""


@pytest.fixture(scope="module")
def live() -> dict[str, tuple[StepCount, Events]]:
    cases = {name: [*SMALL, *case] for name, case in LIVE.items()}
    return run_ranks(counted_like_a_gpu, 1, cases, 2, init=False)[0]


def counted_like_a_gpu(cases: dict[str, list[str]], world: int) -> dict[str, tuple[StepCount, Events]]:
    """In a process of its own, which this changes."""
    from stack.bench.exact import num_layers
    from stack.bench.one_process import count_alone, countable

    found, events = {}, _watch_deepspeed()
    for name, given in cases.items():
        cfg = compose_config(given, strict=False)
        found[name] = count_alone(countable(cfg, num_layers(cfg)), world, "gpu"), list(events)
    return found


def _watch_deepspeed() -> Events:
    """What its coordinator does since a forward began."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator,
        ZeroParamStatus,
        iter_params,
    )
    from deepspeed.utils import z3_leaf_module

    events: Events = []
    gathers = "_PartitionedParameterCoordinator__all_gather_params"
    reset, fetch, gather = (
        getattr(PartitionedParameterCoordinator, name) for name in ("reset_step", "fetch_sub_module", gathers)
    )

    def reset_step(self: Any) -> None:
        events.clear()
        reset(self)

    def fetch_sub_module(self: Any, module: Any, forward: bool) -> None:
        params: list[Any] = list(iter_params(module, recurse=z3_leaf_module(module)))
        if params:
            events.append(("enter", sorted(param.ds_numel for param in params)))
        fetch(self, module, forward)

    def gather_params(self: Any, params: Any, forward: bool) -> None:
        missing = [param for param in params if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            events.append(("gather", sorted(param.ds_numel for param in missing)))
        gather(self, params, forward)

    for name, function in (
        ("reset_step", reset_step), ("fetch_sub_module", fetch_sub_module), (gathers, gather_params),
    ):  # fmt: skip
        setattr(PartitionedParameterCoordinator, name, function)
    return events


@pytest.mark.parametrize("name", LIVE)
def test_small_shapes_agree_with_the_exact_count(
    name: str, live: dict[str, tuple[StepCount, Events]]
) -> None:
    found = _planned([*SMALL, *LIVE[name]], 2)
    exact = live[name][0]
    for phase, most in exact.warm.items():
        mine = found.memory.phases[phase].num_bytes
        assert mine == pytest.approx(most.num_bytes, rel=0.06 if phase == "forward" else APART), phase
    assert found.memory.peak.num_bytes == pytest.approx(exact.peak.num_bytes, rel=APART)
    assert found.communication["all-to-all"] == exact.traffic["all-to-all"]
    assert found.communication["reduce-scatter"] == exact.traffic["reduce-scatter"]


@pytest.mark.parametrize("name", LIVE)
def test_modules_are_entered_and_parameters_gathered_as_deepspeed_does(
    name: str, live: dict[str, tuple[StepCount, Events]], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: Events = []
    start, fetch, gather = Zero3.start_step, Zero3.fetch, Zero3._gather

    def start_step(self: Zero3) -> None:
        events.clear()
        start(self)

    def entered(self: Zero3, module: Module) -> None:
        if module.params:
            events.append(("enter", sorted(param.numel for param in module.params)))
        fetch(self, module)

    def gathered(self: Zero3, params: list[Param]) -> None:
        if params:
            events.append(("gather", sorted(param.numel for param in params)))
        gather(self, params)

    for method, function in (("start_step", start_step), ("fetch", entered), ("_gather", gathered)):
        monkeypatch.setattr(Zero3, method, function)
    _planned([*SMALL, *LIVE[name]], 2)
    assert len(events) > 10 and events == live[name][1]


SIZES = (300, 70)
"""Numbers of each parameter."""


def _real_sums(tiles: int, dtype: torch.dtype) -> tuple[int, int]:
    """(most bytes, bytes at the end) while `ops/param_grads.py` sums up: gradients, sums and totals."""
    params = [torch.ones(size, dtype=dtype, requires_grad=True) for size in SIZES]
    value, one = torch.ones((), dtype=dtype, requires_grad=True), torch.ones((), dtype=dtype)
    outputs = [torch.stack([(param * value).sum() for param in params]).sum() for _ in range(tiles)]
    with LiveBytes() as live:
        sums = ParamGrads(params)
        peak = 0
        for output in outputs:
            live.peak_device = live.device
            sums.backward([output], [value], [one])
            peak = max(peak, live.peak_device - live.at_start)
        live.peak_device = live.device
        totals = sums.totals()
        found = live.peak_device - live.at_start, live.device - live.at_start
    assert len(totals) == len(SIZES)
    return found


def _counted_sums(tiles: int, width: int) -> tuple[int, int]:
    """The same by `plan/lean.py`."""
    ledger = Ledger()
    op = Operators(ledger, Zero3(ledger, ZeroSettings(world=1, width=width)), width, fused_norms=False)
    params = [Param(f"{size}", size) for size in SIZES]
    sums = Sums(op, params)
    for _ in range(tiles):
        capture = Capture(params)
        capture.found = {param: op.new(param.numel * width, INDEX[GATHERED]) for param in params}
        sums.add(capture)
        del capture
    ledger.restart()
    ledger.enter("totals")
    totals = sums.totals()
    assert len(totals) == len(SIZES)
    return ledger.peaks()["totals"].num_bytes, ledger.live


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_totals_of_a_layers_gradients_are_all_made_before_a_sum_goes(
    tiles: int, dtype: torch.dtype, width: int
) -> None:
    """In 16 bit 6 bytes an element, in no other moment of the ready experiments more than there is elsewhere."""
    found = _counted_sums(tiles, width)
    assert found == _real_sums(tiles, dtype)
    assert found[0] == sum(SIZES) * (6 if width == 2 and tiles > 1 else width)


def test_what_was_let_go_does_not_come_back_with_others_of_its_buffer() -> None:
    """Two parameters fetched ahead in one buffer are copied out of it once, when the first is asked for. At Qwen3-30B-A3B
    one that came back was not gathered again, and the weights of the experts beside it had no joint buffer: 0.75 GiB."""
    ledger = Ledger()
    zero = Zero3(ledger, ZeroSettings(world=4, width=2, prefetch=1000, max_reuse=0))
    ahead, first, second = (Param(name, size) for name, size in (("ahead", 40), ("first", 8), ("second", 12)))
    modules = [Module(param.name, [param]) for param in (ahead, first, second)]
    zero.start_step()
    for module in modules:
        zero.fetch(module)
        zero.release(module)
    assert ledger.live == 0
    zero.start_step()
    zero.fetch(modules[0])
    assert ledger.live == 2 * (40 + 8 + 12)  # one buffer for two
    zero.release(modules[0])
    zero.fetch(modules[1])
    assert ledger.live == 2 * (8 + 12) + 2 * (8 + 12)  # copied, while the second has not been asked for
    zero.release(modules[1])
    assert first.data is None and ledger.live == 2 * (8 + 12) + 2 * 12
    zero.fetch(modules[2])
    assert first.data is None and ledger.live == 2 * 12


def test_the_copy_that_a_checkpoint_is_written_from_is_in_the_hosts_memory() -> None:
    base = ["+exp=qwen3_1m", "site=h100x8"]

    def copied(*overrides: str) -> int:
        host = _planned([*base, *overrides], 8).host
        assert host.rank_bytes > host.kept_bytes + host.checkpoint_copy_bytes
        return host.checkpoint_copy_bytes

    written = _planned(base, 8).checkpoint_bytes / 8
    assert (
        written < copied() == 3 * (2**32 + 2**27)
    )  # groups of 1e9 and 24e6 fp32 numbers, each up to a power of two
    assert copied("checkpoint.asynchronous=false") == copied("checkpoint=none") == 0
    nvme = ("engine=zero3_nvme", "engine.nvme_path=/tmp")
    assert copied(*nvme) == written and copied(*nvme, "checkpoint.asynchronous=false") == 0
    on_disk = _planned([*base, *nvme], 8)
    # fp32: weights, two moments and gradients; all but the last are saved
    assert 3 * on_disk.host.nvme_bytes == 4 * written
    # The gradients of the shard, and five buffers of a group of 1e8.
    assert on_disk.host.optimizer_bytes == written / 3 + 5 * 4e8
    assert (
        copied("engine=zero3_offload_optimizer") == written
    )  # from host memory, which is not page-locked for it
