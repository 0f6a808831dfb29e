"""Who am I: rank, number of ranks and address, from the variables of deepspeed, torchrun or srun, or of one plain process.

To support another launcher, add a function that reads its variables and one branch in `read_rank_env`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from stack.dist.node_list import expand_node_list
from stack.errors import LaunchError

DEFAULT_PORT = 29500  # what deepspeed and torchrun take when no port is given
LOOPBACK = ("localhost", "127.0.0.1", "::1")
RANK_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OTHER_STARTERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
}
"""Number of processes, as starters say it whose variables are not read: each of theirs would be taken for a whole run."""

NOT_OF_SRUN = ("batch", "extern", "interactive")
"""Slurm's names of steps that srun did not start."""


ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def use_growing_segments(environ: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its segments, unless the user has set it otherwise. Call it before torch is imported.

    With fixed segments a replay of Qwen3-8B's step at 1M tokens needed a card 19 % larger than what it had allocated; with
    growing ones 0.3 %. The forecast counts on them.
    """
    if not any(key in environ for key in ALLOCATOR_KEYS):
        environ[ALLOCATOR_KEYS[0]] = "expandable_segments:True"


@dataclass(frozen=True)
class RankEnv:
    """One rank's place: `rank` of `world`, `local_rank` of `local_world` on its node, and where rank 0 listens."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    addr: str
    port: int
    launcher: str
    """`deepspeed`, `torchrun`, `srun`, `plain`, or `environment` where the variables came from something else."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value} outside 0..{limit - 1}"
            for name, value, limit in (
                ("rank", self.rank, self.world),
                ("local rank", self.local_rank, self.local_world),
                ("ranks on this node", self.local_world, self.world + 1),
                ("port", self.port, 65536),
            )
            if not 0 <= value < limit
        ]
        if wrong:
            raise LaunchError(f"contradictory rank variables ({self.launcher}): " + ", ".join(wrong))


def read_rank_env(environ: Mapping[str, str]) -> RankEnv:
    """The place of this process. Raises LaunchError, naming the variables, where they are partial or contradictory.

    RANK, WORLD_SIZE, LOCAL_RANK go before srun's variables, since deepspeed and torchrun may themselves run under srun.
    MASTER_ADDR and MASTER_PORT alone do not make a rank: batch scripts export them for their tasks.
    """
    in_step = _in_srun_step(environ)
    if "RANK" in environ or "LOCAL_RANK" in environ or ("WORLD_SIZE" in environ and not in_step):
        return _from_rank_variables(environ, in_step)
    if in_step:
        return _from_srun(environ)
    for key, starter in OTHER_STARTERS.items():
        if environ.get(key) and _integer(environ, key) > 1:
            raise LaunchError(
                f"{key}={environ[key]} but no RANK: {starter} alone is not supported. Fix: start with deepspeed, torchrun or "
                "srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process"
            )
    return RankEnv(0, 1, 0, 1, "127.0.0.1", _free_port(), "plain")


def apply_rank_env(env: RankEnv) -> None:
    """Sets the variables that torch and DeepSpeed read, so that every launcher looks the same to them."""
    values: MutableMapping[str, str] = {
        "RANK": str(env.rank),
        "WORLD_SIZE": str(env.world),
        "LOCAL_RANK": str(env.local_rank),
        "LOCAL_WORLD_SIZE": str(env.local_world),
        "MASTER_ADDR": env.addr,
        "MASTER_PORT": str(env.port),
    }
    os.environ.update(values)


def _from_rank_variables(environ: Mapping[str, str], in_step: bool) -> RankEnv:
    missing = [key for key in RANK_KEYS if not environ.get(key)]
    if missing:
        given = ", ".join(f"{key}={environ[key]}" for key in RANK_KEYS if environ.get(key))
        raise LaunchError(
            f"rank variables are incomplete: {given} set, {', '.join(missing)} missing. Fix: start with deepspeed, torchrun "
            f"or srun, which set them all; for one plain process: unset {' '.join(RANK_KEYS)}"
        )
    rank, world, port = (_integer(environ, key) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    addr = environ["MASTER_ADDR"]
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    else:
        launcher = "deepspeed" if "CROSS_RANK" in environ else "environment"
    local_key = next((key for key in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environ.get(key)), None)
    if local_key is None and addr not in LOOPBACK:
        raise LaunchError(
            "rank variables are incomplete: LOCAL_WORLD_SIZE (ranks on this node) missing. Fix: set it"
        )
    local_world = world if local_key is None else _integer(environ, local_key)
    if launcher == "environment" and in_step:
        _refuse_batch_shell_values(environ, rank, world)
    if launcher == "deepspeed" and port == DEFAULT_PORT and local_world == world:
        # Nobody chose the port, and two jobs on one host would meet on it. All ranks of a job have the same parent, which
        # no other job has.
        port = 20000 + os.getppid() % 10000
    return RankEnv(rank, world, _integer(environ, "LOCAL_RANK"), local_world, addr, port, launcher)


def _refuse_batch_shell_values(environ: Mapping[str, str], rank: int, world: int) -> None:
    """RANK=$SLURM_PROCID written outside srun's own quotes is 0 in every task."""
    tasks, task = _num_tasks(environ), _integer(environ, "SLURM_PROCID")
    if world == tasks > 1 and rank != task:
        raise LaunchError(
            f"RANK={rank} but SLURM_PROCID={task} of {tasks}: RANK was expanded in the batch shell, not in the task. "
            "Fix: do not export RANK and LOCAL_RANK; SLURM_PROCID and SLURM_LOCALID are read here"
        )


def _in_srun_step(environ: Mapping[str, str]) -> bool:
    """True in a task that srun started; false in the shell of sbatch or salloc, where one process is meant.

    The batch shell has SLURM_PROCID=0 and SLURM_NTASKS as well, but no step number (ENVIRONMENT=BATCH marks it); the
    interactive step of salloc has the reserved number 2^32-6.
    """
    if "SLURM_PROCID" not in environ:
        return False
    key = next((key for key in ("SLURM_STEP_ID", "SLURM_STEPID") if environ.get(key)), None)
    if key is None:
        return environ.get("ENVIRONMENT") != "BATCH"
    return environ[key] not in NOT_OF_SRUN and _integer(environ, key) < 2**32 - 16


def _num_tasks(environ: Mapping[str, str]) -> int:
    for key in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        if environ.get(key):
            return _integer(environ, key)
    raise LaunchError(
        "SLURM_PROCID is set but SLURM_NTASKS is missing. Fix: start with srun, or unset SLURM_PROCID"
    )


def _from_srun(environ: Mapping[str, str]) -> RankEnv:
    world = _num_tasks(environ)
    if environ.get("WORLD_SIZE") and _integer(environ, "WORLD_SIZE") != world:
        raise LaunchError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} but srun started {world} tasks. Fix: unset WORLD_SIZE"
        )
    nodes = _node_list(environ)
    if environ.get("MASTER_ADDR"):
        addr = environ["MASTER_ADDR"]
    elif len(nodes) == 1:
        addr = "127.0.0.1"
    elif nodes:
        addr = nodes[0]  # srun puts task 0 on the first node of the list
    else:
        raise LaunchError(
            "SLURM_JOB_NODELIST and MASTER_ADDR are both missing. Fix: export MASTER_ADDR in the batch script"
        )
    if world > 1 and len(nodes) > 1 and addr in LOOPBACK:
        raise LaunchError(
            f"MASTER_ADDR={addr} cannot be reached from {len(nodes)} nodes. Fix: unset it, or name {nodes[0]}"
        )
    local_world = _tasks_on_this_node(environ, world, max(1, len(nodes)))
    rank, local_rank = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_LOCALID")
    return RankEnv(rank, world, local_rank, local_world, addr, _srun_port(environ, world), "srun")


def _srun_port(environ: Mapping[str, str], world: int) -> int:
    """Below 32768, where the system hands out ports of its own; another one for each job, step and restart."""
    if environ.get("MASTER_PORT"):
        return _integer(environ, "MASTER_PORT")
    if world == 1:
        return _free_port()
    job_key = next((key for key in ("SLURM_JOB_ID", "SLURM_JOBID") if environ.get(key)), None)
    if job_key is None:
        raise LaunchError(
            "SLURM_JOB_ID and MASTER_PORT are both missing. Fix: export MASTER_PORT in the batch script"
        )
    restart, step = (
        _integer(environ, key) if environ.get(key) else 0 for key in ("SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    )
    return 20000 + (_integer(environ, job_key) + 1000 * restart + 97 * step) % 10000


def _tasks_on_this_node(environ: Mapping[str, str], world: int, num_nodes: int) -> int:
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    node = environ.get("SLURM_NODEID")
    if num_nodes == 1:
        return world
    if counts and node:
        # "2(x3),1": three nodes with two tasks each, then one with one
        parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in counts.split(",")]
        spread = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
        place = _integer(environ, "SLURM_NODEID")
        if all(parts) and sum(spread) == world and place < len(spread):
            return spread[place]
    if environ.get("SLURM_NTASKS_PER_NODE"):
        return _integer(environ, "SLURM_NTASKS_PER_NODE")
    raise LaunchError(
        f"SLURM_STEP_TASKS_PER_NODE={counts!r} and SLURM_NODEID={node!r} do not give the tasks of this node (of {world} in "
        "all). Fix: start with srun --ntasks-per-node"
    )


def _node_list(environ: Mapping[str, str]) -> list[str]:
    for key in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(key):
            return expand_node_list(environ[key])
    return []


def _integer(environ: Mapping[str, str], key: str) -> int:
    text = environ.get(key, "")
    if not re.fullmatch(r"\d+", text):
        raise LaunchError(
            f"{key}={text!r}: expected a whole number. Fix: start with deepspeed, torchrun or srun"
        )
    return int(text)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
