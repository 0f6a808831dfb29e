"""Rank variables of every launcher, the node lists of Slurm, and the refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stack.dist import topology
from stack.dist.env import RankEnv, apply_rank_env, read_rank_env, use_growing_segments
from stack.dist.failure import clear_errors
from stack.dist.node_list import expand_node_list
from stack.dist.topology import select_device
from stack.errors import LaunchError
from tests.fork_ranks import RANK_VARIABLES

RANK_1_OF_2 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}
# As a task of `srun` on two nodes sees them (Slurm 22.05), and the shell of the batch script above it.
BATCH = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
TASK_2 = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
}
TORCHRUN = RANK_1_OF_2 | {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
DEEPSPEED = RANK_1_OF_2 | {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, RankEnv(1, 2, 1, 2, "127.0.0.1", 29511, "torchrun")),
        (DEEPSPEED, RankEnv(1, 2, 1, 2, "127.0.0.1", 29511, "deepspeed")),
        (RANK_1_OF_2, RankEnv(1, 2, 1, 2, "127.0.0.1", 29511, "environment")),
        (TASK_2 | TORCHRUN, RankEnv(1, 2, 1, 2, "127.0.0.1", 29511, "torchrun")),
        (TASK_2, RankEnv(2, 4, 0, 2, "node1", 23456, "srun")),
        (TASK_2 | {"MASTER_ADDR": "login", "MASTER_PORT": "4000"}, RankEnv(2, 4, 0, 2, "login", 4000, "srun")),
        (TASK_2 | {"SLURM_RESTART_COUNT": "2"}, RankEnv(2, 4, 0, 2, "node1", 25456, "srun")),
        (TASK_2 | {"SLURM_STEP_ID": "1"}, RankEnv(2, 4, 0, 2, "node1", 23553, "srun")),
        (
            TASK_2 | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"},
            RankEnv(2, 3, 0, 1, "node1", 23456, "srun"),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"},
            RankEnv(1, 2, 1, 2, "127.0.0.1", 20007, "srun"),
        ),
    ],
    ids=["torchrun", "deepspeed", "by hand", "torchrun in a step", "srun", "address given", "restart", "second step",
         "uneven", "one node"],
)  # fmt: skip
def test_launchers(environ: dict[str, str], expected: RankEnv) -> None:
    assert read_rank_env(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "4000"},
        BATCH,
        {key: value for key, value in BATCH.items() if key not in ("SLURM_PROCID", "ENVIRONMENT")},
        BATCH | {"ENVIRONMENT": "", "SLURM_STEP_ID": "4294967290"},
        BATCH | {"ENVIRONMENT": "", "SLURM_STEP_ID": "batch"},
        BATCH | {"SLURM_STEP_ID": ""},
        {"OMPI_COMM_WORLD_SIZE": "", "PMI_SIZE": "1"},
    ],
    ids=["nothing", "address alone", "sbatch shell", "salloc shell", "interactive step", "named step", "empty step",
         "empty size"],
)  # fmt: skip
def test_one_plain_process(environ: dict[str, str]) -> None:
    env = read_rank_env(environ)
    assert (env.rank, env.world, env.local_rank, env.local_world, env.launcher) == (0, 1, 0, 1, "plain")
    assert env.addr == "127.0.0.1" and 1024 <= env.port < 65536


def test_two_jobs_of_the_deepspeed_launcher_do_not_share_its_default_port() -> None:
    env = read_rank_env(DEEPSPEED | {"MASTER_PORT": "29500"})
    assert env.port == 20000 + os.getppid() % 10000
    over_nodes = read_rank_env(DEEPSPEED | {"MASTER_PORT": "29500", "LOCAL_SIZE": "1", "LOCAL_RANK": "0"})
    assert over_nodes.port == 29500  # the launchers of two nodes have different numbers


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing", "RANK=0, WORLD_SIZE=2 set"]),
        ({"WORLD_SIZE": "2"}, ["RANK, LOCAL_RANK"]),
        ({"LOCAL_RANK": "0"}, ["RANK, WORLD_SIZE"]),
        (RANK_1_OF_2 | {"RANK": "2"}, ["rank=2 outside 0..1"]),
        (RANK_1_OF_2 | {"RANK": "one"}, ["RANK='one'"]),
        (RANK_1_OF_2 | {"WORLD_SIZE": "-2"}, ["WORLD_SIZE='-2'"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["local rank=2 outside 0..1"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, ["ranks on this node=3 outside 0..2"]),
        (RANK_1_OF_2 | {"MASTER_PORT": "99999"}, ["port=99999"]),
        (RANK_1_OF_2 | {"MASTER_ADDR": "node1"}, ["LOCAL_WORLD_SIZE"]),
        (TASK_2 | RANK_1_OF_2 | {"RANK": "0", "WORLD_SIZE": "4"}, ["RANK=0 but SLURM_PROCID=2 of 4", "batch shell"]),
        (TASK_2 | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8 but srun started 4 tasks"]),
        (TASK_2 | {"MASTER_ADDR": "localhost"}, ["MASTER_ADDR=localhost cannot be reached from 2 nodes"]),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, ["SLURM_NTASKS"]),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, ["SLURM_JOB_NODELIST", "MASTER_ADDR"]),
        (TASK_2 | {"SLURM_LOCALID": ""}, ["SLURM_LOCALID"]),
        (TASK_2 | {"SLURM_JOB_ID": ""}, ["SLURM_JOB_ID", "MASTER_PORT"]),
        (TASK_2 | {"SLURM_STEP_TASKS_PER_NODE": "2"}, ["SLURM_STEP_TASKS_PER_NODE='2'"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2", "mpirun"]),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, ["OMPI_COMM_WORLD_SIZE='two'", "a whole number"]),
        ({"MV2_COMM_WORLD_SIZE": "2"}, ["MV2_COMM_WORLD_SIZE=2", "mpirun"]),
        ({"JSM_NAMESPACE_SIZE": "6"}, ["JSM_NAMESPACE_SIZE=6", "jsrun"]),
        ({"FLUX_JOB_SIZE": "8"}, ["FLUX_JOB_SIZE=8", "flux run"]),
        (TASK_2 | {"SLURM_STEP_ID": "first"}, ["SLURM_STEP_ID='first'", "a whole number"]),
        (TASK_2 | {"SLURM_RESTART_COUNT": "once"}, ["SLURM_RESTART_COUNT='once'"]),
        (TASK_2 | {"SLURM_NODEID": "a"}, ["SLURM_NODEID='a'"]),
    ],
)  # fmt: skip
def test_partial_or_contradictory_variables_are_named(environ: dict[str, str], names: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        read_rank_env(environ)
    for name in names:
        assert name in str(caught.value)
    assert "Fix:" in str(caught.value) or "contradictory" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a[01-03,07],b1", "a01 a02 a03 a07 b1"),
        ("node1", "node1"),
        ("node[8-11]", "node8 node9 node10 node11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]n[3,5]", "r1n3 r1n5 r2n3 r2n5"),
        ("gpu-[1-2].cluster,login-1", "gpu-1.cluster gpu-2.cluster login-1"),
    ],
)
def test_node_lists(text: str, names: str) -> None:
    assert expand_node_list(text) == names.split()


@pytest.mark.parametrize("text", ["a[1-", "a[3-1]", "a[x-y]", "a,,b", "a]1[", ""])
def test_unknown_node_lists_go_to_scontrol(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="cannot be read"):
        expand_node_list(text)
    fake = tmp_path / "scontrol"
    fake.write_text('#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo first && echo second\n')
    fake.chmod(0o755)
    assert expand_node_list(text) == ["first", "second"]
    fake.write_text("#!/bin/sh\necho no such node >&2\nexit 1\n")
    with pytest.raises(LaunchError, match="no such node"):
        expand_node_list(text)


def test_apply_makes_every_launcher_look_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    env = read_rank_env(TASK_2)
    for key in RANK_VARIABLES:
        monkeypatch.setenv(key, "")  # so that what is set below is undone
    apply_rank_env(env)
    again = read_rank_env(os.environ)
    assert (again.rank, again.world, again.local_world, again.addr, again.port) == (2, 4, 2, "node1", 23456)


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, clear_errors():
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_the_allocator_grows_its_segments_unless_the_user_says_otherwise() -> None:
    environ: dict[str, str] = {}
    use_growing_segments(environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    use_growing_segments(own)
    assert own == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}


@pytest.mark.parametrize(
    ("launcher", "visible", "index"),
    [("srun", 1, 0), ("srun", 4, 3), ("deepspeed", 4, 3), ("torchrun", 1, None)],
)
def test_a_task_that_sees_one_gpu_tells_deepspeed_so(
    launcher: Any, visible: int, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed takes its device from LOCAL_RANK."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    env = RankEnv(3, 4, 3, 4, "127.0.0.1", 1, launcher)
    if index is None:
        with pytest.raises(LaunchError, match="local rank 3 has no GPU: 1 visible"):
            select_device(env, "cuda")
        return
    assert select_device(env, "cuda") == torch.device("cuda", index)
    assert chosen == [index] and os.environ["LOCAL_RANK"] == str(index)


def test_the_device_of_such_a_task_stands_once_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(topology, "_new_group", lambda *args: None)
    for key in RANK_VARIABLES:
        monkeypatch.setenv(key, "3")
    found = topology.init_topology(RankEnv(3, 4, 3, 4, "127.0.0.1", 1, "srun"), 1, "cuda", 5)
    assert found.device == torch.device("cuda", 0) and os.environ["LOCAL_RANK"] == "0"
