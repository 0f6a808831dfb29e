"""The lines of a batch script that make the place in which ranks run: modules, Python, variables, network, container."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from stack.config.schema_cluster import ClusterConfig
from stack.errors import ConfigError, Fault

NETWORKS: dict[str, dict[str, str]] = {
    "default": {},
    "infiniband": {
        "NCCL_IB_TIMEOUT": "22",  # 4.096 us x 2^22 = 17 s for an answer, not 4: a switch that reroutes takes seconds
    },
    "efa": {
        "FI_PROVIDER": "efa",  # no other, such as TCP, without a word
        "FI_EFA_USE_DEVICE_RDMA": "1",  # from GPU memory without a copy, where the instance can
        "FI_EFA_FORK_SAFE": "1",  # data workers fork
    },
    "ethernet": {
        "NCCL_IB_DISABLE": "1",  # cards that are there without a fabric behind them make NCCL wait for it
        "NCCL_SOCKET_NTHREADS": "4",  # one connection seldom fills a fast link
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
}
"""Choice of `cluster.network` -> variables of NCCL and libfabric, each with its reason."""

ALWAYS = {
    "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a stack
    "PYTHONUNBUFFERED": "1",  # what was printed before a node is lost is in the log
}


def environment_lines(cluster: ClusterConfig, project: Path) -> list[str]:
    """Shell lines in the order in which they have to run."""
    lines = []
    if cluster.modules:
        lines += ["module purge", *(f"module load {shlex.quote(name)}" for name in cluster.modules)]
    if (venv := python_environment(cluster, project)) is not None:
        lines.append(f"source {shlex.quote(str(venv / 'bin' / 'activate'))}")
    values: dict[str, object] = {**ALWAYS, **NETWORKS[cluster.network]}
    if cluster.interface:
        values |= {"NCCL_SOCKET_IFNAME": cluster.interface, "GLOO_SOCKET_IFNAME": cluster.interface}
    if not cluster.gpus_per_node:
        values |= {"DS_ACCELERATOR": "cpu"}
        ranks = cluster.ranks_per_node or 1
        values |= {"OMP_NUM_THREADS": str(max(1, (cluster.cpus_per_node or ranks) // ranks))}
    values |= cluster.environment
    lines += [f"export {name}={expanding(value)}" for name, value in values.items() if value is not None]
    return lines + list(cluster.setup)


def python_environment(cluster: ClusterConfig, project: Path) -> Path | None:
    """The virtual environment to activate. Raises ConfigError if the one that is named is not there."""
    if cluster.venv is None:
        found = project / ".venv"
        return found if cluster.container == "none" and (found / "bin" / "activate").exists() else None
    found = project / Path(cluster.venv).expanduser()
    if cluster.container == "none" and not (found / "bin" / "activate").exists():
        want = f"a Python environment ({found} has no bin/activate)"
        raise ConfigError([Fault("cluster.venv", cluster.venv, want, "check the path, or cluster.venv=null")])
    return found


def container_lines(cluster: ClusterConfig, folders: Sequence[Path]) -> list[str]:
    """The two arrays that job.sh puts around every command: options of srun, and a command in front.

    folders: what has to be there inside under the same path; one that lies in another is left out.
    """
    if cluster.container == "none" or cluster.image is None:
        return []
    apart = [
        path for path in folders if not any(path != other and path.is_relative_to(other) for other in folders)
    ]
    mounts = [*(f"{path}:{path}" for path in dict.fromkeys(apart)), *cluster.mounts]
    if cluster.container == "pyxis":
        options = [f"--container-image={cluster.image}", f"--container-mounts={','.join(mounts)}"]
        options += [f"--container-workdir={folders[0]}", "--no-container-mount-home"]
        return [f"CONTAINER=({shlex.join(options)})"]
    command = ["apptainer", "exec", *(["--nv"] if cluster.gpus_per_node else [])]
    command += [word for mount in mounts for word in ("--bind", mount)]
    return [f"INSIDE=({shlex.join([*command, '--pwd', str(folders[0]), cluster.image])})"]


def expanding(value: object) -> str:
    """A value in the shell's double quotes, in which `$NAME` still means the job's variable."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    text = re.sub(r'([\\"`])', r"\\\1", text)
    return text if re.fullmatch(r"[A-Za-z0-9_./:=,@%+-]+", text) else f'"{text}"'
