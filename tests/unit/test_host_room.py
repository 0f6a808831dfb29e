"""Whether what layers keep fits on the host is known at the start: bytes, limits, refusals and warnings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stack.train.host_room as host_room
from stack.config import derive
from stack.config.compose import compose_config
from stack.config.derive import REPO_ROOT
from stack.config.kept import HostBytes
from stack.config.schema import RunConfig
from stack.dist.env import RankEnv
from stack.dist.host_memory import HostMemory, host_memory
from stack.errors import MemoryShortage
from stack.models.build import prepare_model
from stack.models.registry import DEFAULT
from stack.train.host_room import check_host_room, kept_bytes, make_nvme_room

GIB = 1 << 30
SETTINGS = ["model=bench", "data=random", "schedule.steps=1", "data.seq_len=1000", "parallel.sp=2"]


def config(*overrides: str) -> RunConfig:
    return compose_config([*SETTINGS, *overrides], world=2)


def spec_of(cfg: RunConfig):
    return prepare_model(cfg.model, cfg.data.seq_len, torch.bfloat16, 0).built.spec


def test_nothing_is_kept_on_the_host_without_offload() -> None:
    cfg = config("memory=lean", "memory.offload=false")
    assert kept_bytes(cfg, spec_of(cfg), True) == HostBytes()


def test_a_family_without_a_lean_layer_keeps_what_checkpoints_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("memory=lean")
    spec = spec_of(cfg)
    monkeypatch.setattr(host_room, "family_of", lambda _: DEFAULT)
    assert kept_bytes(cfg, spec, False).in_memory == spec.num_layers * 500 * spec.hidden * 2
    unchecked = config("memory=lean", "memory.checkpointing=none")
    assert kept_bytes(unchecked, spec, False) == HostBytes()


TABLE = json.loads((REPO_ROOT / "tests" / "plan" / "exact.json").read_text())["rows"]


@pytest.mark.parametrize("exp", sorted({row["exp"] for row in TABLE}))
def test_built_models_keep_what_the_exact_count_found(exp: str) -> None:
    """Its sizes come from the built model; those of the forecast, from the config, are in test_plan_memory.py."""
    rows = [
        row for row in TABLE if row["exp"] == exp and not any("zero3" in text for text in row["overrides"])
    ]
    assert {row["memory"] for row in rows} == {"plain", "checkpoint", "alst", "lean"}
    spec = None
    for row in rows:
        given = [f"+exp={exp}", f"memory={row['memory']}", *row["overrides"]]
        cfg = compose_config(given, strict=False)
        spec = spec or spec_of(replace(cfg, model=replace(cfg.model, path=None, init="scratch")))
        on_gpu = cfg.site.device != "cpu"
        assert kept_bytes(cfg, spec, on_gpu).in_memory == row["host_bytes"], row["memory"]


def ask(
    monkeypatch: pytest.MonkeyPatch,
    there: HostMemory | None,
    need: int,
    *overrides: str,
    copy: int = 0,
    **env: Any,
) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(host_room, "host_memory", lambda: there)
    spills = "memory.host_gib=4" in overrides
    found = HostBytes(4 * GIB, need - 4 * GIB, GIB) if spills else HostBytes(need)
    monkeypatch.setattr(host_room, "kept_bytes", lambda *_: found)
    cfg = config("memory=lean", *overrides)
    place = {
        "rank": 0,
        "world": 2,
        "local_rank": 0,
        "local_world": 2,
        "addr": "a",
        "port": 1,
        "launcher": "plain",
    }
    check_host_room(cfg, spec_of(cfg), RankEnv(**place | env), False, copy, told.append)
    return told


def test_room_enough_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, HostMemory(10 * GIB, 20 * GIB), 5 * GIB) == []
    assert ask(monkeypatch, None, 5 * GIB) == []


def test_too_little_at_present_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = ask(monkeypatch, HostMemory(10 * GIB, 20 * GIB), 6 * GIB)
    assert text.startswith("warning: ") and "6.0 GiB a rank" in text and "12.0 GiB for the 2 ranks" in text
    assert "10.0 of 20.0 GiB" in text and "memory.spill_folder" in text and "memory.host_gib=4" in text


def test_what_can_never_fit_is_refused_by_one_rank_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryShortage, match=r"22\.0 GiB for the 2 ranks"):
        ask(monkeypatch, HostMemory(10 * GIB, 20 * GIB), 11 * GIB)
    assert ask(monkeypatch, HostMemory(10 * GIB, 20 * GIB), 11 * GIB, rank=1, local_rank=1) == []


def test_the_copy_that_checkpoints_are_written_from_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    there = HostMemory(10 * GIB, 20 * GIB)
    assert ask(monkeypatch, there, 3 * GIB, copy=2 * GIB) == []
    (both,) = ask(monkeypatch, there, 4 * GIB, copy=2 * GIB)
    assert "the layers keep 4.0 GiB a rank" in both and "a copy of 2.0 GiB a rank" in both
    assert "12.0 GiB for the 2 ranks" in both
    assert both.endswith(
        "Fix: checkpoint.asynchronous=false, which needs no copy; or more ranks, on more nodes"
    )
    (too_much,) = ask(monkeypatch, there, 6 * GIB, copy=2 * GIB)
    assert "Fix: checkpoint.asynchronous=false, which needs no copy, and memory.spill_folder=" in too_much
    (alone,) = ask(monkeypatch, there, 0, copy=6 * GIB)
    assert "the layers" not in alone and "memory.spill_folder" not in alone
    with pytest.raises(MemoryShortage, match=r"22\.0 GiB for the 2 ranks .* checkpoint\.asynchronous=false"):
        ask(monkeypatch, there, 4 * GIB, copy=7 * GIB)
    # What layers keep is known; the copy is a forecast, which may be overruled.
    (told,) = ask(monkeypatch, there, 4 * GIB, "plan.gate=warn", copy=7 * GIB)
    assert "22.0 GiB for the 2 ranks" in told
    with pytest.raises(MemoryShortage):
        ask(monkeypatch, there, 11 * GIB, "plan.gate=warn")


def test_with_a_folder_memory_is_needed_for_the_bound_and_disk_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spill = (f"memory.spill_folder={tmp_path}", "memory.host_gib=4")
    monkeypatch.setattr(host_room.shutil, "disk_usage", lambda _: SimpleNamespace(free=15 * GIB))
    assert ask(monkeypatch, HostMemory(10 * GIB, 20 * GIB), 11 * GIB, *spill) == []
    with pytest.raises(MemoryShortage, match=r"will write 16.0 GiB \(\d+ bytes\) there and 15.0 GiB"):
        ask(monkeypatch, HostMemory(10 * GIB, 20 * GIB), 12 * GIB, *spill)
    (text,) = ask(monkeypatch, HostMemory(7 * GIB, 20 * GIB), 11 * GIB, *spill)
    assert "a smaller memory.host_gib" in text


def model_of(num_parameters: int) -> nn.Module:
    frozen = nn.Parameter(torch.empty(2**40, device="meta"), requires_grad=False)
    return nn.ParameterList([frozen, nn.Parameter(torch.empty(num_parameters, device="meta"))])


def test_states_on_a_disk_need_their_room_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = config("engine=zero3_nvme", f"engine.nvme_path={tmp_path}")
    node = RankEnv(0, 4, 0, 2, "a", 1, "plain")  # one of two nodes
    monkeypatch.setattr(host_room.shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * GIB))
    make_nvme_room(cfg, model_of(GIB // 2), node)
    with pytest.raises(MemoryShortage, match=r"2 ranks takes 8\.0 GiB \(\d+ bytes\) there and 4\.0 GiB"):
        make_nvme_room(cfg, model_of(GIB), node)
    make_nvme_room(replace(cfg, optim=replace(cfg.optim, name="sgd")), model_of(GIB), node)
    make_nvme_room(cfg, model_of(GIB), replace(node, rank=1, local_rank=1))
    left = Path(derive.nvme_folder(cfg) or "") / "zero_stage_3" / "optimizer" / "rank0" / "1_2.tensor.swp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of a start that was killed, on other ranks")
    other = tmp_path / "run-0123456789ab"
    other.mkdir()
    make_nvme_room(cfg, model_of(1), replace(node, rank=1, local_rank=1))
    assert left.exists()
    make_nvme_room(cfg, model_of(1), node)
    assert not left.exists() and other.is_dir()


def test_a_bound_below_one_layer_is_refused_before_the_model_is_filled(tmp_path: Path) -> None:
    cfg = config("memory=lean", f"memory.spill_folder={tmp_path}", "memory.host_gib=0.0004")
    env = RankEnv(0, 2, 0, 2, "a", 1, "plain")
    with pytest.raises(
        MemoryShortage, match=r"memory\.host_gib=0\.0004: a layer keeps .* GiB a rank\. Fix: "
    ):
        check_host_room(cfg, spec_of(cfg), env, False, 0, print)
    check_host_room(
        replace(cfg, memory=replace(cfg.memory, host_gib=0.001)), spec_of(cfg), env, False, 0, print
    )


def test_what_to_do_is_what_the_run_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    alst = config("memory=alst")
    monkeypatch.setattr(host_room, "host_memory", lambda: HostMemory(10 * GIB, 20 * GIB))
    monkeypatch.setattr(host_room, "kept_bytes", lambda *_: HostBytes(6 * GIB))
    env, told, spec = RankEnv(0, 2, 0, 2, "a", 1, "plain"), [], spec_of(alst)
    check_host_room(alst, spec, env, False, 0, told.append)
    assert "Fix: memory=lean memory.spill_folder=FOLDER" in told[0]
    monkeypatch.setattr(host_room, "family_of", lambda _: DEFAULT)
    check_host_room(alst, spec, env, False, 0, told.append)
    assert "spill" not in told[1] and "Fix: more ranks a row, on more nodes, or a shorter" in told[1]


def tree(root: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    800 kB\n"} | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


KB = 1024


def test_the_narrowest_control_group_counts(tmp_path: Path) -> None:
    assert host_memory(tmp_path / "no") is None
    assert host_memory(tree(tmp_path / "a", {})) == HostMemory(800 * KB, 1000 * KB)
    group = "sys/fs/cgroup/slurm/job"
    version_2 = {
        "proc/self/cgroup": "0::/slurm/job/step\n",
        f"{group}/memory.max": f"{500 * KB}\n",
        f"{group}/memory.current": f"{300 * KB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {100 * KB}\n",
        f"{group}/step/memory.max": "max\n",
        f"{group}/step/memory.current": "0\n",
        f"{group}/step/memory.stat": "inactive_file 0\n",
    }
    assert host_memory(tree(tmp_path / "b", version_2)) == HostMemory(300 * KB, 500 * KB)
    base = "sys/fs/cgroup/memory"
    version_1 = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1\n",
        f"{base}/memory.limit_in_bytes": f"{600 * KB}\n",
        f"{base}/memory.usage_in_bytes": f"{600 * KB}\n",
        f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * KB}\n",
    }
    assert host_memory(tree(tmp_path / "c", version_1)) == HostMemory(50 * KB, 600 * KB)
    version_1[f"{base}/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert host_memory(tree(tmp_path / "d", version_1)) == HostMemory(800 * KB, 1000 * KB)
