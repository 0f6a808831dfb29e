"""The preflight: what a node finds by itself, what the comparison of nodes names, and that nothing waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stack.dist.env import RankEnv
from stack.submit import node
from stack.submit.node import Report, look, source_hash
from stack.submit.preflight import Preflight
from stack.submit.verdict import compare, missing, skewed, slow, unreachable
from tests.ranks import ROOT

SMI = '#!/bin/bash\n[ -n "$HANG" ] && sleep 60\nprintf \'%s\' "$ROWS"\nexit ${SMI_CODE:-0}\n'
GOOD = [f"{index}, NVIDIA H100 80GB HBM3, 4, 81559, 0, 550.54.15" for index in range(4)]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    file = tmp_path / "bin" / "nvidia-smi"
    file.parent.mkdir()
    file.write_text(SMI)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ROWS", "\n".join(GOOD) + "\n")
    return monkeypatch


def faults(tmp_path: Path, num_gpus: int = 4) -> list[str]:
    return look(num_gpus, tmp_path / "run", str(tmp_path / "scratch"), 1).faults


def test_healthy_node(smi: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = look(4, tmp_path / "run", "", 1)
    assert report.faults == []
    assert (
        report.facts["GPUs"] == "4 x NVIDIA H100 80GB HBM3 81559 MiB"
        and report.facts["driver"] == "550.54.15"
    )
    assert (
        report.facts["torch"] == __import__("torch").__version__.partition("+")[0]
        or "+" in report.facts["torch"]
    )
    assert not list((tmp_path / "run").iterdir()), "no probe is left behind"
    assert "not looked at" in look(0, tmp_path / "run", "", 1).notes["GPUs"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1, NVIDIA H100 80GB HBM3, 40960, 81559, 0, 550.54.15", "GPU 1 has 40.0 GiB in use"),
        ("1, NVIDIA H100 80GB HBM3, 4, 81559, 3, 550.54.15", "GPU 1 has 3 uncorrected ECC"),
        ("", "3 GPU(s) visible, 4 expected"),
    ],
)
def test_bad_gpus(row: str, said: str, smi: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi.setenv("ROWS", "\n".join([GOOD[0], row, *GOOD[2:]]) + "\n")
    (fault,) = faults(tmp_path)
    assert fault.startswith(said) and "Fix: " in fault


def test_gpus_of_other_jobs_are_left_alone(smi: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi.setenv("ROWS", "\n".join([GOOD[0], "1, X, 40960, 81559, 9, 1", *GOOD[2:]]) + "\n")
    smi.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert faults(tmp_path, 2) == []


def test_driver_that_fails_or_hangs(smi: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi.setenv("SMI_CODE", "15")
    smi.setenv("ROWS", "Unable to determine the device handle for GPU0000: GPU is lost.")
    assert "GPU is lost" in faults(tmp_path)[0]
    smi.setenv("HANG", "1")
    smi.setattr(node, "LIMIT_S", 0.2)
    assert "no answer within 0 s" in faults(tmp_path)[0]
    smi.setenv("PATH", "")
    assert "there is no nvidia-smi" in faults(tmp_path)[0]


def test_folders_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    report = look(0, tmp_path / "file" / "run", str(tmp_path / "file"), 1)
    assert [fault.split(str(tmp_path))[0] for fault in report.faults] == [
        "the run folder ",
        "the cluster.scratch ",
    ]
    monkeypatch.setattr(node, "MIN_DISK_GIB", 1e9)
    monkeypatch.setattr(node, "MIN_SHM_GIB", 1e9)
    assert [fault.split(" has ")[0] for fault in faults(tmp_path, 0)] == [
        "/dev/shm", f"the run folder {tmp_path}/run", f"the cluster.scratch {tmp_path}/scratch",
    ]  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setattr(node.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert look(0, tmp_path, "", 1).faults == []
    assert "means 127.0.1.1 here" in look(0, tmp_path, "", 2).faults[0]


def test_source_hash_sees_code_and_settings(tmp_path: Path) -> None:
    (tmp_path / "stack").mkdir()
    found = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "stack" / "a.py").write_text(text)
        found.add(source_hash(tmp_path))
    (tmp_path / "stack" / "a.txt").write_text("no code")
    found.add(source_hash(tmp_path))
    assert len(found) == 2


def reports(**torch: str) -> dict[str, Report]:
    return {name: Report(name, {"torch": version, "source": "s"}) for name, version in torch.items()}


def test_odd_node_is_named() -> None:
    assert compare(reports(a="2.13", b="2.13")) == []
    (fault,) = compare(reports(a="2.12", b="2.13", c="2.13"))
    assert fault.startswith("torch differs: a has 2.12; b, c have 2.13. Fix: ")
    (fault,) = compare(reports(**{f"n{number}": "2.13" for number in range(9)}, odd="2.12"))
    assert "odd has 2.12; 9 others have 2.13" in fault
    several = reports(a="2.13", b="2.13")
    several["b"].faults.append("no GPU")
    several["b"].facts["source"] = "t"
    assert [fault.split(":")[0] for fault in compare(several)] == ["b", "source differs"]


def test_silent_unreachable_skewed_and_slow_nodes_are_named() -> None:
    assert missing(["a", "b"], ["a", "b"], 60, "a:1") == []
    assert missing(["a", "b"], ["a"], 60, "a:1")[0].startswith("b: no word to a:1 within 60 s")
    assert unreachable({"a": {}, "b": {}}) == []
    (fault,) = unreachable(
        {"a": {"c": "timed out"}, "b": {"c": "timed out"}, "c": {"a": "no route", "b": "no route"}}
    )
    assert fault.startswith("c: takes part in 4 of 4 pairs")
    assert skewed({"a": 0.0, "b": -4.0}) == []
    assert skewed({"a": 0.0, "b": -7.25})[0].startswith("b: its clock is 7.2 s behind")
    assert slow({}) == [] == slow({"a": 3e9, "b": 2e9})
    assert slow({"a": 3e9, "b": 3e9, "c": 1e9})[0].startswith("c: 1 GB/s")


def test_clock_offsets_are_only_what_is_sure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may answer at any moment between two readings here."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    preflight = Preflight(RankEnv(0, 2, 0, 1, "a", 1, "srun"), tmp_path, 20)
    now = time.time()
    monkeypatch.setattr(preflight, "_gather", lambda *_: {"a": str(now), "b": str(now - 60)})

    class Store:
        def set(self, key: str, value: str) -> None: ...

    (fault,) = preflight._clocks(Store())  # type: ignore[arg-type]
    assert fault.startswith("b: its clock is 60.")


def start(folder: Path, rank: int, limit_s: int, before: str = "") -> subprocess.Popen[str]:
    """One of two ranks on two nodes `a` and `b`, which are this machine."""
    # torch first: its import takes long on a busy machine, and is not what is timed
    code = f"import torch.distributed\n{before}\nfrom stack.submit.preflight import main\nmain()"
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    task = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_JOB_NODELIST": "a,b",
    }
    # The loopback would be refused by its usual names.
    place = {
        "MASTER_ADDR": "127.0.0.2",
        "PREFLIGHT_S": str(limit_s),
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, **job, **task, **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


LOCAL = "from stack.submit import node\nnode._look_at_name = lambda *_: None\nnode.source_hash = lambda _: 'same'\n"


def test_lone_rank_names_the_node_it_waits_for(tmp_path: Path) -> None:
    rank = start(tmp_path, 0, 6, LOCAL)
    output, _ = rank.communicate(timeout=100)
    assert rank.returncode == 1 and "b: no word to 127.0.0.2:" in output and "within 3 s" in output, output


def test_collective_that_hangs_is_named(tmp_path: Path) -> None:
    """The second node's rank never comes to the first collective."""
    stuck = (
        "import time\nfrom stack.submit import preflight, traffic\n"
        "preflight.Preflight._connect = lambda *_: {}\ntraffic.init = lambda *_: time.sleep(90)\n"
    )
    quiet = "from stack.submit import preflight\npreflight.Preflight._connect = lambda *_: {}\n"
    ranks = [start(tmp_path, 0, 24, LOCAL + quiet), start(tmp_path, 1, 24, LOCAL + stuck)]
    outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "meeting of all ranks was passed by no rank" in outputs[0], outputs
