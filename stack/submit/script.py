"""One readable batch script from the settings: directives, environment, and a call of what `launch/slurm/job.sh` defines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.config import derive
from stack.config.schema import RunConfig
from stack.config.schema_cluster import ClusterConfig
from stack.submit.environment import container_lines, environment_lines, expanding


@dataclass(frozen=True)
class Task:
    """One run of a script: its folder, seen from the nodes, and the overrides of launch/train.py that describe it."""

    folder: Path
    overrides: tuple[str, ...]


def train_script(cfg: RunConfig, tasks: Sequence[Task], folder: Path, project: Path, work: Path) -> str:
    """A run, or an array of runs where there are several tasks.

    folder: where the script and its log lie. project: what holds launch/ and stack/. work: where relative paths start.
    """
    cluster, array = cfg.cluster, len(tasks) > 1
    ranks = derive.ranks_per_node(cluster)
    name = tasks[0].folder.name if not array else folder.name
    head = f"{cluster.nodes} node(s) x {ranks} rank(s), started by {cluster.launcher}"
    options = [
        *_place(cluster, folder, name, array),
        *_nodes(cluster, cluster.nodes, ranks if cluster.launcher == "srun" else 1),
        f"--time={cluster.time}",
        f"--signal=B:USR1@{cluster.warn_s}",
        "--requeue" if cluster.restart == "requeue" else "--no-requeue",
        "--open-mode=append",
    ]
    if array:
        options.append(f"--array=0-{len(tasks) - 1}")
    options += cluster.extra
    settings = {
        "PROJECT": project,
        "SCRIPT": folder / "job.sbatch",
        "LAUNCHER": cluster.launcher,
        "RANKS_PER_NODE": ranks,
        "RESTART": cluster.restart,
        "MAX_FAILURES": cluster.max_failures,
        "PREFLIGHT_S": cluster.preflight_s if cluster.preflight else 0,
    }
    lines = [
        *_head(f"{name}: {head}.", options, work),
        *environment_lines(cluster, project),
        "",
        "set -u  # not before: modules and environments read variables that are not set",
        *(f"{key}={shlex.quote(str(value))}" for key, value in settings.items()),
        *([f"SCRATCH={expanding(cluster.scratch)}"] if cluster.scratch else []),
        *container_lines(cluster, [work, project, folder.parent if array else folder]),
        *_choice(tasks),
        "",
        'source "$PROJECT/launch/slurm/job.sh"',
        'run_job "${OVERRIDES[@]}"',
    ]
    return "\n".join(lines) + "\n"


def prepare_script(
    cfg: RunConfig,
    overrides: Sequence[str],
    folder: Path,
    project: Path,
    work: Path,
    shards: int,
    merge: bool = False,
) -> str:
    """The preparation of tokens: one array task a shard, or the merge behind them."""
    cluster = cfg.cluster
    kind = "merge" if merge else "prepare"
    options = [
        *_place(cluster, folder, f"{cfg.name}-{kind}", not merge, kind),
        *_nodes(cluster, 1, 1, gpus=False),
        f"--time={cluster.time}",
        "--open-mode=append",
    ]
    if not merge:
        options.append(f"--array=0-{shards - 1}")
    options += cluster.extra
    share = "merge=true" if merge else f'"shard=$SLURM_ARRAY_TASK_ID/{shards}"'
    about = f"{cfg.name}: {'the merge of' if merge else 'tokens in'} {shards} shard(s)."
    command = [*("python", str(project / "launch" / "prepare.py")), *overrides]
    lines = [
        *_head(about, options, work),
        *environment_lines(cluster, project),
        *container_lines(cluster, [work, project]),
        "",
    ]
    around = '"${CONTAINER[@]}" ' if cluster.container == "pyxis" else ""
    inside = '"${INSIDE[@]}" ' if cluster.container == "apptainer" else ""
    step = 'srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --export=ALL'
    lines.append(f"{step} {around}{inside}{shlex.join(command)} {share}")
    return "\n".join(lines) + "\n"


def _head(about: str, options: Sequence[str], work: Path) -> list[str]:
    return [
        "#!/bin/bash",
        f"# {about} Written by launch/submit.py; may be submitted again by hand: sbatch FILE",
        *(f"#SBATCH {option}" for option in options),
        "set -eo pipefail",
        f"cd {shlex.quote(str(work))}",
        "",
    ]


def _place(cluster: ClusterConfig, folder: Path, name: str, array: bool, kind: str = "slurm") -> list[str]:
    """Name, log, and the part of the cluster."""
    log = str(folder).replace("%", "%%") + f"/{kind}-{'%A_%a' if array else '%j'}.out"
    options = [f"--job-name={name}", f'--output="{log}"' if re.search(r"\s", log) else f"--output={log}"]
    for key in ("partition", "account", "qos", "reservation", "constraint", "exclude"):
        if (value := getattr(cluster, key)) is not None:
            options.append(f"--{key}={value}")
    return options


def _nodes(cluster: ClusterConfig, nodes: int, tasks: int, gpus: bool = True) -> list[str]:
    """Nodes and what is asked of each; tasks: on each node."""
    options = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    if cluster.exclusive and gpus:
        options.append("--exclusive")
    if cluster.cpus_per_node is not None:
        options.append(f"--cpus-per-task={max(1, cluster.cpus_per_node // tasks)}")
    if cluster.memory_gib is not None:
        options.append(f"--mem={cluster.memory_gib}G")
    elif cluster.exclusive and gpus:
        options.append("--mem=0")
    count = f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else str(cluster.gpus_per_node)
    if cluster.gpus_per_node and gpus and cluster.gpu_request != "none":
        options.append(f"--gpus-per-node={count}" if cluster.gpu_request == "gpus" else f"--gres=gpu:{count}")
    return options


def _choice(tasks: Sequence[Task]) -> list[str]:
    """RUN_FOLDER and OVERRIDES of the task that this is."""

    def settings(task: Task, indent: str) -> list[str]:
        folder = f"RUN_FOLDER={shlex.quote(str(task.folder))}"
        return [indent + folder, f"{indent}OVERRIDES=({shlex.join(task.overrides)})"]

    if len(tasks) == 1:
        return settings(tasks[0], "")
    lines = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, task in enumerate(tasks):
        lines += [f"{number})", *settings(task, "    "), "    ;;"]
    return [*lines, "esac"]
