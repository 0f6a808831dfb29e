"""The `cluster` section of the schema: how `launch/submit.py` asks a batch system for nodes. See `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(kw_only=True)
class ClusterConfig:
    """Nodes, and the life of a job on them. Training itself reads none of it, so a restart may change any of it."""

    name: str = "none"
    """Label of the cluster."""

    scheduler: Literal["none", "slurm"] = "none"
    """The batch system. `none`: runs are started by hand, and `launch/submit.py` refuses."""

    partition: str | None = None
    """Partition (queue) of the job. None: the cluster's default."""

    account: str | None = None
    """Account that pays. None: the user's default."""

    qos: str | None = None
    """Quality of service, which bounds time and priority. None: the user's default."""

    reservation: str | None = None
    """Nodes set aside under this name. None: none."""

    constraint: str | None = None
    """Features that every node has, such as `h100&ib`. None: any node."""

    exclude: str | None = None
    """Nodes not to run on, in Slurm's short form, such as those that the preflight named: `'"gpu[07,12]"'` on the command
    line, where Hydra wants brackets quoted."""

    nodes: int = 1
    """Nodes of the job."""

    gpus_per_node: int = 8
    """GPUs of each node. 0: ranks on the CPU."""

    gpu_type: str | None = None
    """Type of the GPUs where a cluster has several, such as `h100`. None: any."""

    gpu_request: Literal["gpus", "gres", "none"] = "gpus"
    """How GPUs are asked for: `gpus` as --gpus-per-node, `gres` as --gres on clusters that know only that, `none`
    where a node always comes with all of its own."""

    ranks_per_node: int | None = None
    """Ranks on each node. None: one a GPU, or one where there is none."""

    cpus_per_node: int | None = None
    """CPUs of each node. None: what the cluster gives, all of them with `exclusive`."""

    memory_gib: int | None = None
    """GiB of host memory of each node. None: all of it, which offload needs."""

    exclusive: bool = True
    """Take whole nodes. False shares them with other jobs, where a cluster allows that."""

    time: str = "1-00:00:00"
    """Time limit of one start as [DAYS-]HOURS:MINUTES:SECONDS or MINUTES. The run may take longer: it is saved and
    queued again."""

    warn_s: int = 600
    """Seconds before the time limit at which the ranks are asked to save and end: more than a step and a save
    take together, less than the limit. Slurm may send it up to 60 s early."""

    restart: Literal["requeue", "chain", "none"] = "requeue"
    """How a run goes on behind the time limit, preemption or the loss of a node: `requeue` queues the same job again;
    `chain` submits the next job behind this one, for clusters that forbid requeueing; `none` leaves it to the user."""

    max_failures: int = 2
    """Starts in a row that may bring no newer checkpoint, because they fail, lose a node, or are warned before their first
    step; then the job ends for good, as it would go on so for ever. Starts that preemption ends do not count."""

    launcher: Literal["deepspeed", "torchrun", "srun"] = "deepspeed"
    """What starts the ranks of a node, below one srun: a deepspeed or torchrun launcher on each, or srun itself, a task a
    rank."""

    preflight: bool = True
    """Look at every node before training: GPUs, versions, clocks, folders, and the network by two collectives."""

    preflight_s: int = 120
    """Seconds that the preflight may take until the node that keeps it waiting is named."""

    container: Literal["none", "pyxis", "apptainer"] = "none"
    """Run inside a container: `pyxis` (NVIDIA's srun plugin over enroot) or `apptainer` (once Singularity)."""

    image: str | None = None
    """Image of the container: a .sqsh or .sif file, or an address that the runtime can fetch."""

    mounts: list[str] = field(default_factory=list)
    """Further folders inside the container, as OUTSIDE:INSIDE. The start folder, the project and the run folder are
    always there."""

    modules: list[str] = field(default_factory=list)
    """Environment modules to load, in order, behind `module purge`."""

    venv: str | None = None
    """Python environment to activate, relative to the project. None: `.venv` there if it exists; with a container, the
    container's own Python."""

    setup: list[str] = field(default_factory=list)
    """Shell lines that prepare the environment, on the first node before the ranks start."""

    environment: dict[str, Any] = field(default_factory=dict)
    """Environment variables of all ranks; they win over those of `network`, and null leaves one out."""

    network: Literal["default", "infiniband", "efa", "ethernet"] = "default"
    """Variables for NCCL that fit the fabric between the nodes (`stack/submit/network.py`). `default`: none, since NCCL finds
    its way on most clusters."""

    interface: str | None = None
    """Network interface over which ranks find each other, such as `eth0` or `ib0`. None: NCCL and gloo choose."""

    scratch: str | None = None
    """Folder on each node's own disk, for the caches of compilers, which a shared file system is slow and unsafe for. May
    name variables of the job, such as `/scratch/$SLURM_JOB_ID`. None: the user's home."""

    work: str | None = None
    """Folder that the job runs in, seen from the nodes: relative paths of settings start there. None: where the command was
    started."""

    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, such as `--mail-type=FAIL` or `--switches=1`. They come last and win."""
