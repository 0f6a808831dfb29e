"""The forecast at the start of a run: what is refused, what is said, and that nothing but a refusal ends a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stack.train.forecast as forecast
from stack.checkpoint.state import TrainState
from stack.config.compose import compose_config
from stack.config.schema import RunConfig
from stack.data.store import TokenStore
from stack.dist.env import RankEnv
from stack.dist.host_memory import HostMemory
from stack.errors import ConfigError, ForecastRefusal
from stack.plan.forecast import GIB
from stack.plan.machine import read_machine
from stack.train.calibration import WARM_STEPS, CalibrationHook
from stack.train.forecast import Outlook, announce, describe, look_ahead
from tests.unit.train_fakes import one_rank

ENV = RankEnv(rank=0, world=8, local_rank=0, local_world=8, addr="127.0.0.1", port=1, launcher="plain")
FITS = ["+exp=qwen3_1m", "site=h100x8"]
TOO_LARGE = [*FITS, "memory=plain"]


@pytest.fixture(autouse=True)
def large_host(monkeypatch) -> None:
    monkeypatch.setattr(forecast, "host_memory", lambda: HostMemory(free=900 * GIB, total=1000 * GIB))


def configured(*overrides: str) -> RunConfig:
    return compose_config(list(overrides), world=8)


def said(outlook: Outlook) -> str:
    return "\n".join(describe(outlook))


def test_a_run_that_cannot_fit_is_refused_with_numbers_and_levers() -> None:
    with pytest.raises(ForecastRefusal) as refused:
        look_ahead(configured(*TOO_LARGE), ENV, "cuda")
    text = str(refused.value)
    assert "does not fit" in text and "live tensors" in text and "in the " in text
    assert "memory=lean" in text and "GiB a GPU less" in text and "plan.gate=warn" in text


def test_warn_says_the_same_and_goes_on() -> None:
    outlook = look_ahead(configured(*TOO_LARGE, "plan.gate=warn"), ENV, "cuda")
    assert "does not fit" in said(outlook) and "memory=lean" in said(outlook)


def test_off_asks_nothing() -> None:
    outlook = look_ahead(configured(*TOO_LARGE, "plan.gate=off"), ENV, "cuda")
    assert outlook == Outlook() and said(outlook) == ""


def test_a_run_that_fits_is_forecast() -> None:
    text = said(look_ahead(configured(*FITS), ENV, "cuda"))
    assert (
        "forecast: live tensors 2" in text and "GiB: " in text and "a step " in text and "kept a rank" in text
    )


def test_the_copy_of_checkpoints_is_known_to_the_check_of_host_memory() -> None:
    copied = look_ahead(configured(*FITS), ENV, "cuda").checkpoint_copy_bytes
    assert (
        copied > 12 * 8e9 / 8
    )  # more than the fp32 weights and moments of a rank's 8th of 8 billion parameters
    assert (
        look_ahead(configured(*FITS, "checkpoint.asynchronous=false"), ENV, "cuda").checkpoint_copy_bytes == 0
    )
    assert Outlook().checkpoint_copy_bytes == 0


def test_nothing_is_refused_on_the_cpu_and_it_is_said_why() -> None:
    text = said(look_ahead(configured(*TOO_LARGE, "site=cpu"), ENV, "cpu"))
    assert "does not fit" not in text and text.count("this is the CPU") == 1 and "live tensors" in text


def test_a_cpu_whose_memory_is_given_is_judged_by_it() -> None:
    small = ["+exp=tiny_cpu", "site.memory_gib=0.05", "site.host_memory_gib=64"]
    alone = replace(ENV, world=1, local_world=1)
    with pytest.raises(ForecastRefusal, match="does not fit"):
        look_ahead(compose_config(small, world=1), alone, "cpu")
    text = said(look_ahead(compose_config([*small, "plan.gate=warn"], world=1), alone, "cpu"))
    assert text.startswith("warning: this run does not fit") and "of 51.2 MiB: does not fit" in text


def test_more_ranks_are_no_setting_to_paste() -> None:
    with pytest.raises(ForecastRefusal) as refused:
        look_ahead(configured(*FITS, "site.memory_gib=12"), ENV, "cuda")
    text = str(refused.value)
    assert "gpus=" not in text and "parallel.sp=16 on 16 ranks" in text


def test_an_unknown_card_refuses_nothing_and_a_known_amount_of_memory_does(monkeypatch) -> None:
    unknown = look_ahead(configured("+exp=qwen3_1m", "memory=plain", "site=auto"), ENV, "cuda")
    assert unknown.found is not None and unknown.found.answer == "unproven"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    card = type("Properties", (), {"total_memory": 80 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    with pytest.raises(ForecastRefusal, match=r"of 80\.0 GiB"):
        look_ahead(configured("+exp=qwen3_1m", "memory=plain", "site=auto"), ENV, "cuda")


def test_an_unknown_model_is_not_modelled() -> None:
    cfg = configured(*FITS, "model.architecture.model_type=gpt_neox")
    outlook = look_ahead(cfg, ENV, "cuda")
    assert outlook.found is None and said(outlook).startswith("forecast: not modelled: ")


def test_a_fault_of_its_own_does_not_end_the_run(monkeypatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("in the forecast")

    monkeypatch.setattr(forecast.Run, "plan", broken)
    outlook = look_ahead(configured(*TOO_LARGE), ENV, "cuda")
    assert "the run goes on without it" in said(outlook) and "ZeroDivisionError" in said(outlook)


def test_neither_does_one_behind_the_start(monkeypatch, tmp_path: Path) -> None:
    whole = look_ahead(configured(*FITS), ENV, "cuda")
    nothing: Any = object()
    outlook = announce(whole, [nothing], one_rank(), lambda text: None)
    assert "the run goes on without it" in said(outlook) and "AttributeError" in said(outlook)

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("in the comparison")

    monkeypatch.setattr(CalibrationHook, "_measure", broken)
    lines, _ = compared(tmp_path, [1.0] * 6)
    assert len(lines) == 1 and "no comparison" in lines[0] and "ZeroDivisionError" in lines[0]


def test_a_wrong_calibration_file_is_a_fault_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibration"):
        look_ahead(configured(*FITS, f"plan.calibration={tmp_path / 'none.jsonl'}"), ENV, "cuda")


class Store:
    """Two long documents and many short ones."""

    num_documents = 1002
    offsets = np.cumsum([0, 900_000, 300_000, *[1000] * 1000])


def test_short_documents_take_less_time_than_whole_rows(monkeypatch) -> None:
    whole = look_ahead(configured(*FITS), ENV, "cuda")
    store: Any = Store()
    assert not isinstance(store, TokenStore)
    lines: list[str] = []
    outlook = announce(whole, [store], one_rank(), lines.append)
    assert lines == list(describe(outlook)) and lines != list(describe(whole))
    assert outlook.run is not None and whole.found is not None and outlook.found is not None
    squares, tokens = 900_000**2 + 300_000**2 + 1000 * 1000**2, 900_000 + 300_000 + 1000 * 1000
    assert outlook.run.documents == (round(squares / tokens),)
    assert 0 < outlook.found.forecast.time.seconds < 0.7 * whole.found.forecast.time.seconds


def record(step_s: float, skipped: str | None = None) -> dict[str, Any]:
    return {"step_s": step_s, "skipped": skipped}


def compared(tmp_path: Path, seconds: list[float], device: str = "cpu") -> tuple[list[str], Path]:
    """What a hook says of steps that took so long, the forecast being 2 s."""
    outlook = look_ahead(configured(*FITS), ENV, "cuda")
    assert outlook.found is not None
    time = replace(outlook.found.forecast.time, seconds=2.0)
    found = replace(outlook.found, forecast=replace(outlook.found.forecast, time=time))
    lines: list[str] = []
    file = tmp_path / "calibration.jsonl"
    hook = CalibrationHook(replace(outlook, found=found), file, torch.device(device), lines.append, 8)
    for place, one in enumerate(seconds):
        hook.after_step(TrainState(step=place + 1), record(one))
    hook.close()
    return lines, file


def test_a_measurement_near_its_forecast_is_shown_once(tmp_path: Path) -> None:
    lines, file = compared(tmp_path, [9.0, 2.05, 2.0, 2.08, 50.0, 50.0])
    assert len(lines) == 1 and "a step 2.05 s, forecast 2 (+2.5%)" in lines[0] and not file.exists()
    assert "resident memory" in lines[0]  # of these processes, where no card tells


def test_one_that_differs_warns_once_and_is_kept(tmp_path: Path) -> None:
    lines, file = compared(tmp_path, [9.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    assert [line.startswith("warning") for line in lines] == [False, True] and "+50.0%" in lines[1]
    compared(tmp_path, [9.0, 3.0, 3.0, 3.0])  # a resumed run appends
    told = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [one for one in told if one["constant"] == "step_s"]
    assert len(steps) == 2
    assert set(steps[0]) == {
        "constant",
        "value",
        "unit",
        "measured",
        "forecast",
        "when",
        "host",
        "device",
        "ranks",
    }
    assert (steps[0]["value"], steps[0]["forecast"], steps[0]["unit"]) == (3.0, 2.0, "s")
    read_machine(configured(*FITS).site, file)  # quantities that are no constants are passed over


def test_too_few_steps_say_nothing_and_skipped_ones_do_not_count(tmp_path: Path) -> None:
    assert compared(tmp_path, [2.0] * WARM_STEPS)[0] == []
    lines: list[str] = []
    hook = CalibrationHook(Outlook(), tmp_path / "c.jsonl", torch.device("cpu"), lines.append, 1)
    for place, reason in enumerate([None, "nonfinite loss", None, None, "spike", None]):
        hook.after_step(TrainState(step=place + 1), record(1.0 if reason is None else 99.0, reason))
    assert len(lines) == 1 and lines[0].startswith("measured: a step 1 s")


def test_a_card_is_compared_by_what_its_allocator_says(tmp_path: Path, monkeypatch) -> None:
    """The numbers of a card, as torch would give them."""
    for name, value in (
        ("max_memory_allocated", 40 * GIB),
        ("max_memory_reserved", 44 * GIB),
        ("memory_reserved", 44 * GIB),
        ("mem_get_info", (30 * GIB, 80 * GIB)),
        ("get_device_name", "NVIDIA H100"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    lines, file = compared(tmp_path, [9.0, 2.0, 2.0, 2.0], "cuda")
    assert "live tensors at most 40 GiB" in lines[1]
    found = {one["constant"]: one for one in map(json.loads, file.read_text().splitlines())}
    assert found["reserve_share"]["value"] == pytest.approx(0.1)
    assert 0 <= found["context_gib"]["value"] <= 6  # 80 - 30 - 44, less what is assumed of NCCL
    machine = read_machine(configured(*FITS).site, file)
    assert (
        machine.calibrated(8)
        and not machine.calibrated(16)
        and machine.site.reserve_share == pytest.approx(0.1)
    )
