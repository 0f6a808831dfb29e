"""The probe measures constants that a forecast can take."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import stack.bench.probe as probe
from stack.bench.probe import Found, Sizes
from stack.config.compose import compose_config
from stack.config.schema import RunConfig
from stack.dist.env import read_rank_env
from stack.dist.topology import init_topology
from stack.plan.calibration import calibration_line
from stack.plan.machine import UNITS, read_machine
from tests.ranks import run_ranks

ON_CPU = {
    *("peak_tflops", "gemm_share", "attention_share", "memory_tb_s", "memory_share"),
    *("host_link_gb_s", "host_memory_gb_s", "link_gb_s"),
}


def configured() -> RunConfig:
    return compose_config(["model=micro", "site=cpu"], strict=False)


def probed() -> list[Found]:
    topology = init_topology(read_rank_env(dict(os.environ)), 2, "cpu", 60)
    return probe.probe(configured(), topology, 2, 0, Sizes(64, 64, 1 << 20), lambda text: None)


def test_constants_of_two_ranks_are_known_to_the_forecast(tmp_path: Path) -> None:
    ranks = run_ranks(probed, 2)
    found = {one.constant: one for one in ranks[0]}
    assert found.keys() == ON_CPU <= UNITS.keys()
    assert all(one.value > 0 and one.unit == UNITS[name] for name, one in found.items())
    assert [(one.constant, one.value) for one in ranks[0]] == [(one.constant, one.value) for one in ranks[1]]
    # What the slower rank reached, as a share of a peak that is not known here: its own.
    assert found["gemm_share"].value == pytest.approx(1) and found["memory_share"].value == pytest.approx(1)
    file = tmp_path / "calibration.jsonl"
    lines = [
        calibration_line(one.constant, one.value, one.unit, one.measured, one.assumed, "cpu", 2)
        for one in ranks[0]
    ]
    file.write_text("".join(lines))
    machine = read_machine(configured().site, file)
    assert machine.site.link_gb_s == found["link_gb_s"].value
    assert machine.sources["link_gb_s"].startswith("measured here")
    assert machine.missing(2) == []


def test_the_command_starts_ranks_of_its_own_and_appends(tmp_path: Path, monkeypatch) -> None:
    asked = {}

    def spawn(function, arguments, nprocs) -> None:
        asked.update(function=function, arguments=arguments, world=os.environ["WORLD_SIZE"], nprocs=nprocs)

    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(probe, "spawn", spawn)
    file = tmp_path / "here.jsonl"
    probe.probe_command(["probe=true", "model=micro", "site=cpu", f"calibration={file}"])
    assert asked["nprocs"] == 2 and asked["world"] == "2" and asked["function"] is probe._probe_spawned
    assert asked["arguments"][1:] == (file, "cpu")
    for times in (1, 2):
        probe._write([Found("gemm_share", 0.5, "of the peak", "a test", 0.6)], file, "cpu", 2)
        told = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(told) == times
        assert (told[0]["value"], told[0]["forecast"], told[0]["ranks"]) == (0.5, 0.6, 2)
