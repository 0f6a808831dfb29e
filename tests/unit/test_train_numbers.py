"""Counts, utilisation, memory, evaluation, and when hooks act."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stack.checkpoint.state import TrainState
from stack.config.schema_data import DataConfig
from stack.data.loader import Loader
from stack.dist.topology import Topology
from stack.parallel.shard_batch import shard_batch
from stack.train.evaluate import evaluate
from stack.train.hooks import CheckpointHook, EvaluationHook
from stack.train.metrics import (
    FlopCounter,
    Meter,
    Step,
    StepCounts,
    Stopwatch,
    count_step,
    device_peak_tflops,
    document_lengths,
    memory_gib,
)
from tests.stores import counting_store
from tests.unit.train_fakes import FakeEngine, FakeMethod, batch_of, on_threads, one_rank

LENGTHS = [
    5,
    9,
    1,
    3,
    8,
    7,
]  # with rows of 6: pieces of one token at row ends, at row starts, and a document of one


@pytest.mark.parametrize("packing", ["concat", "best_fit", "document"])
@pytest.mark.parametrize("sp", [1, 2, 4])
def test_all_tokens_and_targets_of_an_epoch_are_counted_once(tmp_path: Path, packing: Any, sp: int) -> None:
    store = counting_store(tmp_path / "store", LENGTHS)
    data = DataConfig(packing=packing, seq_len=6, eval_fraction=0.0, micro_batch=2)

    def read(topology: Topology) -> tuple[int, int, int, float]:
        place: Any = {
            "dp": topology.dp,
            "dp_rank": topology.dp_rank,
            "sp": topology.sp,
            "sp_rank": topology.sp_rank,
        }
        loader = Loader(store, data, **place, accumulation=1, seed=1, epochs=1)
        flops = FlopCounter(
            model=lambda lengths: float(sum(lengths)), hardware=lambda lengths: len(lengths), peak_tflops=1
        )
        counts = []
        while (micro_batches := loader.next_step()) is not None:
            counts.append(count_step(FakeMethod(), micro_batches, topology, flops))
        assert sum(count.rows for count in counts) == loader.num_rows
        return (
            sum(count.tokens for count in counts),
            sum(count.targets for count in counts),
            counts[-1].rows,
            sum(count.model_flops for count in counts),
        )

    results = on_threads(4, read, sp)
    tokens, targets = sum(LENGTHS), sum(LENGTHS) - len(LENGTHS)
    assert [result[:2] for result in results] == [(tokens, targets)] * 4
    assert [result[3] for result in results] == [float(tokens)] * 4
    assert len({result[2] for result in results}) == 1


@pytest.mark.parametrize("sp", [1, 2])
def test_the_longest_wait_for_rows_is_told_on_every_rank(sp: int) -> None:
    def count(topology: Topology) -> float:
        wait_s = [0.5, 0.25, 3.5, 0.0][topology.rank]
        return count_step(FakeMethod(), [batch_of([1, 2])], topology, wait_s=wait_s).data_wait_s

    assert on_threads(4, count, sp) == [3.5] * 4


def test_padding_is_no_document() -> None:
    assert document_lengths(batch_of([3, 4, 5, 0], [6, 7, 8, 9], [0, 0, 0, 0])) == [3, 4]


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_of_known_devices(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_peak_tflops(torch.device("cuda", 0), None) == peak
    assert device_peak_tflops(torch.device("cuda", 0), 100.0) == 100.0


def test_a_cpu_has_no_peak_unless_it_is_given() -> None:
    assert device_peak_tflops(torch.device("cpu"), None) is None
    assert device_peak_tflops(torch.device("cpu"), 0.5) == 0.5


def test_record_names_every_number_with_its_unit() -> None:
    def record(topology: Topology) -> dict[str, Any]:
        counts = StepCounts(targets=90, tokens=100, rows=2, model_flops=3e12, hardware_flops=4e12)
        step = Step(lr=0.1, counts=counts, loss=math.inf, grad_norm=2.5, clipped=True)
        step.times_s = {"data_s": 0.5, "forward_backward_s": 1.0, "optimizer_s": 0.5, "step_s": 2.0}
        flops = FlopCounter(lambda lengths: 0, lambda lengths: 0, peak_tflops=3.0)
        return Meter(topology, flops).record(TrainState(step=7, tokens=1000, targets=900), step)

    for values in on_threads(2, record):
        assert values["mfu"] == pytest.approx(3e12 / (3e12 * 2 * 2.0))
        assert values["hfu"] == pytest.approx(4e12 / (3e12 * 2 * 2.0))
        assert (values["tokens_per_s"], values["tokens_per_s_per_rank"]) == (50.0, 25.0)
        assert (values["step"], values["tokens_total"], values["targets_total"]) == (7, 1000, 900)
        assert values["loss"] is None  # inf
        assert {
            "data_s",
            "forward_backward_s",
            "optimizer_s",
            "step_s",
            "host_rss_gib",
            "lr",
            "clipped",
        } <= set(values)


def test_host_memory_grows_with_what_is_held() -> None:
    before = memory_gib(torch.device("cpu"))["host_rss_gib"]
    held = torch.ones(2**26)  # 0.25 GiB
    after = memory_gib(torch.device("cpu"))["host_rss_gib"]
    assert 0.2 < after - before < 0.5
    assert float(held[0]) == 1.0


def test_laps_add_up_to_the_step() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.lap("data_s")
    watch.lap("forward_backward_s")
    laps = watch.laps()
    assert list(laps) == ["data_s", "forward_backward_s", "step_s"]
    assert laps["step_s"] == laps["data_s"] + laps["forward_backward_s"] > 0


ROWS = [[3, 5, 7, 0, 0], [2, 4, 6, 8, 10], [9, 1, 0, 0, 0]]
EMPTY = [0] * 5


@pytest.mark.parametrize(
    "world, sp, split",
    [
        (1, 1, [[ROWS]]),
        (1, 1, [[[row] for row in ROWS]]),
        (2, 1, [[[ROWS[0]], [ROWS[1]]], [[ROWS[2]], [EMPTY]]]),
        (2, 2, [[[row] for row in ROWS]] * 2),
    ],
)
def test_held_out_loss_is_the_mean_over_targets_for_any_split(world: int, sp: int, split: list[Any]) -> None:
    targets = [5, 7, 4, 6, 8, 10, 1]
    expected = sum((1 - target) ** 2 / 100 for target in targets) / 7

    def work(topology: Topology) -> tuple[dict[str, Any], float]:
        engine = FakeEngine(topology)
        whole = [batch_of(*rows) for rows in split[topology.rank]]
        rows = [shard_batch(batch, topology.sp, topology.sp_rank) for batch in whole]
        return evaluate(engine, FakeMethod(), rows, topology) or {}, float(engine.weight)

    for numbers, weight in on_threads(world, work, sp):
        assert numbers["eval_targets"] == 7
        assert numbers["eval_loss"] == pytest.approx(expected, rel=1e-6)
        assert numbers["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert weight == 1.0


def test_held_out_rows_without_a_target_have_no_loss() -> None:
    numbers = evaluate(FakeEngine(one_rank()), FakeMethod(), [batch_of(EMPTY)], one_rank())
    assert numbers is not None
    assert math.isnan(numbers["eval_loss"]) and numbers["eval_targets"] == 0


def steps_with(hook: Any, key: str, steps: int) -> list[int]:
    found = []
    for step in range(1, steps + 1):
        record: dict[str, Any] = {}
        hook.after_step(TrainState(step=step), record)
        found += [step] * (key in record)
    return found


@pytest.mark.parametrize("every, due", [(0, [7]), (3, [3, 6, 7]), (7, [7]), (1, [1, 2, 3, 4, 5, 6, 7])])
def test_evaluation_comes_every_so_many_steps_and_at_the_end(every: int, due: list[int]) -> None:
    hook = EvaluationHook(lambda: {"eval_loss": math.nan}, every, total_steps=7)
    assert steps_with(hook, "eval_loss", 7) == due
    record: dict[str, Any] = {}
    hook.after_step(TrainState(step=7), record)
    assert record["eval_loss"] is None


def cut_evaluation(topology: Topology) -> Any:
    """Rank 1 is asked to stop while the third of four micro-batches is evaluated."""
    engine, asked = FakeEngine(topology), []
    rows = [batch_of([4, 1, 2])] * 4
    wish = lambda: topology.rank == 1 and len(asked) == 3  # noqa: E731  as short as the run's own

    def evaluated(*args: Any) -> Any:
        asked.append(1)
        return plain(*args)

    plain, engine.evaluate = engine.evaluate, evaluated  # type: ignore[method-assign]
    return evaluate(engine, FakeMethod(), rows, topology, wish), len(asked)


def test_evaluation_is_dropped_by_all_ranks_behind_the_same_micro_batch() -> None:
    assert on_threads(2, cut_evaluation) == [(None, 3), (None, 3)]


@pytest.mark.parametrize(
    "every, final, due", [(0, True, [7]), (0, False, []), (3, True, [3, 6, 7]), (3, False, [3, 6])]
)
def test_checkpoints_come_every_so_many_steps_and_at_the_end(every: int, final: bool, due: list[int]) -> None:
    class Saves:
        def save(self, engine: str, state: TrainState, metrics: dict[str, float]) -> None:
            assert (engine, metrics) == ("engine", {})
            calls.append(state.step)

        def poll(self) -> None:
            calls.append("poll")

        def close(self) -> None:
            calls.append("close")

    calls: list[Any] = []
    hook = CheckpointHook(Saves(), "engine", every, final, total_steps=7)
    steps_with(hook, "", 7)
    hook.close()
    assert calls.count("poll") == 7 and calls[-1] == "close"
    saved = [call for call in calls if call not in ("poll", "close")]
    assert saved == due


def test_between_bad_steps_that_the_run_may_go_back_behind_only_the_last_step_is_saved() -> None:
    class Saves:
        def save(self, engine: str, state: TrainState, metrics: dict[str, float]) -> None:
            saved.append(state.step)

        def poll(self) -> None:
            pass

        def close(self) -> None:
            pass

    saved: list[int] = []
    for going_back, due in ((True, [2, 6, 7]), (False, [2, 3, 4, 5, 6, 7])):
        saved.clear()
        hook = CheckpointHook(Saves(), "engine", 1, True, total_steps=7, going_back=going_back)
        for step, bad in ((2, 0), (3, 1), (4, 2), (5, 2), (6, 0), (7, 1)):
            hook.after_step(TrainState(step=step, nonfinite_in_row=bad), {})
        assert saved == due
