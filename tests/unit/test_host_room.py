"""Whether what layers keep fits on the host is known at the start: bytes, limits, refusals and warnings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stack.train.host_room as host_room
from stack.config.compose import compose_config
from stack.config.schema import RunConfig
from stack.dist.env import RankEnv
from stack.dist.host_memory import HostMemory, host_memory
from stack.errors import MemoryShortage
from stack.models.build import prepare_model
from stack.ops.host_store import HostStore
from stack.train.host_room import check_host_room, kept_bytes

GIB = 1 << 30
SETTINGS = ["model=bench", "data=random", "schedule.steps=1", "data.seq_len=1000", "parallel.sp=2"]


def config(*overrides: str) -> RunConfig:
    return compose_config([*SETTINGS, *overrides], world=2)


def spec_of(cfg: RunConfig):
    return prepare_model(cfg.model, cfg.data.seq_len, torch.bfloat16, 0).built.spec


def test_kept_bytes_are_those_that_a_store_takes() -> None:
    cfg = config("memory=lean")
    spec, store = spec_of(cfg), HostStore(True, pin_memory=False)
    for _ in range(spec.num_layers):
        hidden = torch.empty(1, 500, spec.hidden, dtype=torch.bfloat16)
        mixed = torch.empty(1, 500, spec.num_heads * spec.head_dim, dtype=torch.bfloat16)
        store.keep([hidden, mixed, torch.empty(1, spec.num_heads // 2, 1000)])
    assert store.used == kept_bytes(cfg, spec, on_gpu=False)
    assert kept_bytes(config("memory=lean", "memory.offload=false"), spec, False) == 0


def test_generic_checkpoints_are_rounded_up_by_torch_where_they_are_page_locked() -> None:
    cfg = config("memory=alst", "data.seq_len=1200")
    spec = spec_of(cfg)
    assert kept_bytes(cfg, spec, on_gpu=False) == spec.num_layers * 600 * spec.hidden * 2
    assert kept_bytes(cfg, spec, on_gpu=True) == spec.num_layers * 2**19


def ask(
    monkeypatch: pytest.MonkeyPatch, there: HostMemory | None, need: int, *overrides: str, **env: Any
) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(host_room, "host_memory", lambda: there)
    monkeypatch.setattr(host_room, "kept_bytes", lambda *_: need)
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
    check_host_room(cfg, spec_of(cfg), RankEnv(**place | env), False, told.append)
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
