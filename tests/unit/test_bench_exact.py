"""The exact forecast around its counts: which layers are counted, the line through them, and what is said of it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

import stack.bench.exact as exact
from stack.bench.exact import ExactForecast, count, describe, num_layers
from stack.bench.one_process import countable
from stack.bench.step_count import Most, StepCount
from stack.config.compose import compose_config
from stack.config.schema import RunConfig
from stack.errors import ConfigError, LaunchError
from stack.plan.forecast import KEPT, OPTIMIZER
from tests.ranks import run_ranks

EIGHT_B = ["+exp=qwen3_1m", "site=h100x8"]
PHASES = ("forward", "loss", "backward", "optimizer")


def configured(*overrides: str) -> RunConfig:
    return compose_config(list(overrides), strict=False)


def counted(layers: int, bend: int = 0) -> StepCount:
    """100 + 10 bytes a layer; `bend` more a layer beyond the seventh."""
    num_bytes = 100 + 10 * layers + bend * max(0, layers - 7)
    lines = {("MLP", "a.py:1"): 60, ("norms", "b.py:2"): num_bytes - 60}
    phases = {name: Most(num_bytes, dict(lines), "op", num_bytes) for name in PHASES}
    return StepCount(
        init=Most(7 * layers, {("MLP", "a.py:1"): 7 * layers}),
        cold=dict(phases),
        warm=phases,
        states_bytes=3 * layers,
        resting_bytes=4 * layers,
        host={KEPT: 1000 * layers, OPTIMIZER: 8 * layers, "parameters": 2 * layers},
        flops={"gemm": 2.0 * layers, "attention_forward": 1.0 * layers},
        traffic={"all-gather": 5 * layers},
        copied_bytes=2000 * layers,
        operators=100 * layers,
        tokens=64,
    )


@pytest.fixture
def asked(monkeypatch) -> list[list[int]]:
    """Layers of the counts that were taken."""
    found: list[list[int]] = []

    def count_each(cfg: RunConfig, ranks: int, depths: list[int]) -> list[StepCount]:
        found.append(depths)
        return [counted(depth) for depth in depths]

    monkeypatch.setattr(exact, "_count_each", count_each)
    monkeypatch.setattr(exact, "_begin_imports", lambda: None)
    return found


def test_a_few_layers_say_what_all_take(asked: list[list[int]]) -> None:
    lines: list[str] = []
    reuse = "engine.overrides.zero_optimization.stage3_max_reuse_distance=1000000000"
    found = count(configured(*EIGHT_B, reuse), 8, tell=lines.append)
    # A layer has 0.19 billion parameters: from the sixth on, DeepSpeed lets go of what it would use within a billion.
    assert asked == [[7, 8, 14]] and "7, 8 and 14 of 36 layers" in lines[0]
    assert found.memory.peak.num_bytes == 100 + 360 and found.memory.peak.parts == {"MLP": 60, "norms": 400}
    assert found.memory.phases["init"].num_bytes == 7 * 36 and found.memory.states_bytes == 108
    assert (found.host.kept_bytes, found.host.optimizer_bytes, found.host.parameter_bytes) == (36000, 288, 72)
    assert found.flops.hardware == 8 * 36 * 3 and found.flops.attention == 8 * 36
    assert found.communication == {"all-gather": 180} and found.host_traffic_bytes == 72000
    assert found.cold == dict.fromkeys(PHASES, 460) and found.tokens_a_step == 64
    assert "within 0.00%" in found.assumptions[0]
    assert found.lines[0] == ("norms", "b.py:2", 400)


def test_all_layers_are_counted_where_few_do_not_lie_on_a_line(monkeypatch) -> None:
    asked: list[list[int]] = []

    def count_each(cfg: RunConfig, ranks: int, depths: list[int]) -> list[StepCount]:
        asked.append(depths)
        return [counted(depth, bend=2) for depth in depths]

    monkeypatch.setattr(exact, "_count_each", count_each)
    monkeypatch.setattr(exact, "_begin_imports", lambda: None)
    lines: list[str] = []
    bent = [counted(depth, bend=2).warm["loss"].num_bytes for depth in (2, 3, 4)]
    assert bent[2] - bent[1] == bent[1] - bent[0]  # what the first layers do not show
    found = count(configured(*EIGHT_B), 8, layers=7, tell=lines.append)
    assert asked == [[7, 8, 14]] and found.assumptions[0].endswith("within 0.00%")
    found = count(configured(*EIGHT_B), 8, layers=6, tell=lines.append)
    assert asked[1:] == [[6, 7, 12], [36]] and "counting all 36" in " ".join(lines)
    assert found.memory.peak.num_bytes == 100 + 360 + 58 and "all 36" in found.assumptions[0]


@pytest.mark.parametrize(
    ("given", "layers", "want"),
    [
        (EIGHT_B, "all", [36]),
        (["+exp=qwen3_1m", "engine=zero2"], "auto", [2, 3, 4]),
        (EIGHT_B, "auto", [2, 3, 4]),  # nothing is kept for a later use, and a lean block fetches once
        ([*EIGHT_B, "memory=alst"], "auto", [4, 5, 8]),  # fetches 0.4 billion ahead
        ([*EIGHT_B, "model=qwen3_0_6b"], "auto", [28]),  # small layers, of which a fetch takes several
        (["+exp=qwen3_30b_a3b_1m"], "auto", [2, 3, 4]),
        (["+exp=qwen3_4b_256k"], "auto", [36]),  # 11, 12 and 22 would be more
        ([*EIGHT_B, "model.architecture.layer_types=[full_attention,sliding_attention]"], "auto", [36]),
    ],
)
def test_which_layers_are_counted(
    given: list[str], layers: str, want: list[int], asked: list[list[int]]
) -> None:
    cfg = compose_config(given, strict=False)
    count(cfg, 8, layers, tell=lambda text: None)
    assert asked == [want]


def test_a_model_whose_layers_are_not_known_is_refused() -> None:
    cfg = compose_config(["model=hf", "model.path=nobody/nothing", "data=random"], strict=False)
    with pytest.raises(ConfigError, match="whose layers are known"):
        num_layers(cfg)


def test_settings_of_a_count_touch_no_disk_and_need_no_kernel() -> None:
    cfg = configured(
        *EIGHT_B, "engine=zero3_nvme", "engine.nvme_path=disk", "model.attention=flash_attention_2"
    )
    cfg = replace(cfg, memory=replace(cfg.memory, spill_folder="disk", host_gib=1.0))
    made = countable(cfg, 3)
    assert made.model.architecture["num_hidden_layers"] == 3 and made.model.path is None
    assert (made.model.attention, made.memory.spill_folder, made.engine.offload_param) == (
        "sdpa",
        None,
        "cpu",
    )
    told = " ".join(exact._not_modelled(cfg))
    assert "flash_attention_2" in told and "NVMe" in told
    listed = replace(
        cfg, model=replace(cfg.model, path=None, architecture={"num_hidden_layers": 3, "kinds": [1, 2, 3]})
    )
    assert countable(listed, 2).model.architecture == {"num_hidden_layers": 2, "kinds": [1, 2]}


def test_page_locked_inputs_are_rounded_up_but_slabs_are_not() -> None:
    alst = configured(*EIGHT_B, "memory=alst", "data.seq_len=1000000")
    hidden = 125_000 * 4096 * 2
    assert exact._page_lock_rounding(alst) == 2**30 / hidden
    assert exact._page_lock_rounding(configured(*EIGHT_B)) == 1.0


def test_the_table_names_phases_and_lines(asked: list[list[int]]) -> None:
    found = count(configured(*EIGHT_B), 8, tell=lambda text: None)
    text = describe(found)
    assert all(phase in text for phase in ("init", *PHASES)) and "b.py:2" in text
    assert isinstance(found, ExactForecast) and found.as_dict()["lines"]


def broken(cfg: RunConfig, ranks: int) -> StepCount:
    class Odd(Exception):
        def __reduce__(self) -> str:
            raise TypeError("cannot be carried over")

    raise Odd("of torch's own")


def test_what_goes_wrong_inside_a_count_is_told(monkeypatch) -> None:
    monkeypatch.setattr(exact, "count_alone", broken)
    with pytest.raises(LaunchError, match="of torch's own"):
        exact._count_one(configured(*EIGHT_B), 8)


GIVEN = [
    "model=bench",
    "data=random",
    "schedule.steps=1",
    "parallel.sp=2",
    "data.seq_len=512",
    "memory.mlp_tile=100",
]
CASES = {
    "device": ["engine=zero3"],
    "optimizer": ["engine=zero3_offload_optimizer"],
    "all": ["engine=zero3_offload_all", "engine.precision=fp16"],
    "experts": [
        *("engine=zero3", "model.architecture.model_type=qwen3_moe"),
        *("+model.architecture.num_experts=8", "+model.architecture.num_experts_per_tok=2"),
        "+model.architecture.moe_intermediate_size=64",
    ],
}


def counted_as_on_gpus() -> tuple[dict[str, StepCount], dict[str, float], set[str]]:
    """On each of two processes half of the cases: counts on the virtual device, expected FLOPs, and operators that would
    fall apart there."""
    import torch

    from stack.bench.one_process import count_alone
    from stack.bench.virtual_device import ATOMIC
    from stack.models.build import prepare_model
    from stack.models.flops import hardware_flops

    counts, flops = {}, {}
    for name in list(CASES)[int(os.environ["RANK"]) :: 2]:
        cfg = countable(compose_config([*GIVEN, *CASES[name]], strict=False), 2)
        counts[name] = count_alone(cfg, 2)
        spec = prepare_model(cfg.model, 512, torch.bfloat16, 1).built.spec
        flops[name] = hardware_flops(spec, [512], checkpointing=True, tiled_mlp=True, lean=True)
    names = (
        f"{schema.name}.{schema.overload_name}".rstrip(".") for schema in torch._C._jit_get_all_schemas()
    )
    composite = {name for name in names if falls_apart(name) and name.removeprefix("aten::") not in ATOMIC}
    return counts, flops, composite


def falls_apart(name: str) -> bool:
    """Whether an operator has a kernel on real devices, and a composite one for all others."""
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        composite = name.startswith("aten::") and has(name, "CompositeImplicitAutograd")
    except RuntimeError:  # TorchScript's own, which are no operators
        return False
    return composite and (has(name, "CPU") or has(name, "CUDA"))


@pytest.fixture(scope="module")
def on_gpus() -> tuple[dict[str, StepCount], dict[str, float], set[str]]:
    first, second = run_ranks(counted_as_on_gpus, 2, init=False)
    return first[0] | second[0], first[1] | second[1], first[2]


def test_what_is_offloaded_is_on_the_host(on_gpus: tuple) -> None:
    counts = on_gpus[0]
    layer = 256 * (2 * 8 * 32 + 2 * 4 * 32 + 3 * 768) + 2 * 32 + 2 * 256
    shard = (2 * layer + 2 * 4096 * 256 + 256) / 2
    device, optimizer, everything = (counts[name] for name in ("device", "optimizer", "all"))
    assert device.host.get("optimizer states", 0) == 0
    # Master weights and both moments in fp32, and what a step makes beside them.
    assert 12 * shard <= optimizer.host["optimizer states"] < 17 * shard
    assert device.states_bytes - optimizer.states_bytes == pytest.approx((12 + 4) * shard, rel=0.01)
    assert optimizer.host["gradients"] == pytest.approx(4 * shard, rel=0.01)
    assert everything.host["parameters"] == pytest.approx(2 * shard, rel=0.01)
    assert optimizer.states_bytes - everything.states_bytes == pytest.approx(2 * shard, rel=0.01)
    assert optimizer.copied_bytes > device.copied_bytes > 2 * device.host["kept activations"]


@pytest.mark.parametrize("name", ["device", "experts"])
def test_flops_are_those_of_the_shapes(name: str, on_gpus: tuple) -> None:
    """By convention the backward of attention is twice its forward; the kernel computes the scores again."""
    counts, expected, _ = on_gpus
    found = counts[name].flops
    assert 2 * (found["gemm"] + found["attention_forward"] * 3) == expected[name]
    assert found["attention_backward"] == 2.5 * found["attention_forward"]


def test_every_other_operator_stays_whole_on_the_virtual_device(on_gpus: tuple) -> None:
    """A new torch may bring more of them: add them to `virtual_device.ATOMIC`."""
    assert on_gpus[2] - {"aten::native_channel_shuffle"} == set()
