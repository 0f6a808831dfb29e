"""What the settings of `cluster` mean together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stack.config import derive
from stack.config.schema_cluster import ClusterConfig
from stack.errors import Fault

OWNED = {
    "--job-name": "name",
    "-J": "name",
    "--nodes": "cluster.nodes",
    "-N": "cluster.nodes",
    "--ntasks": "cluster.ranks_per_node",
    "-n": "cluster.ranks_per_node",
    "--ntasks-per-node": "cluster.ranks_per_node",
    "--signal": "cluster.warn_s",
    "--requeue": "cluster.restart",
    "--no-requeue": "cluster.restart",
    "--open-mode": "the run folder",
    "--output": "the run folder",
    "-o": "the run folder",
    "--array": "-m",
    "-a": "-m",
    "--no-kill": "cluster.restart",
    "-k": "cluster.restart",
}
"""Options of sbatch that the job's life hangs on -> what says them. The others may stand in `cluster.extra`."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FREE_TEXT = ("partition", "account", "qos", "reservation", "constraint", "exclude", "gpu_type", "time")


def cluster_faults(cluster: ClusterConfig) -> Iterator[Fault]:
    """Contradictions, and what would break the script."""
    for name in FREE_TEXT:
        value = getattr(cluster, name)
        if value is not None and (not value or re.search(r"\s", value)):
            yield Fault(
                f"cluster.{name}", value, "one word without spaces", "leave it out, or write it as one"
            )
    if cluster.scheduler == "none":
        return
    yield from _time(cluster)
    yield from _container(cluster)
    if cluster.gpus_per_node and cluster.ranks_per_node not in (None, cluster.gpus_per_node):
        want = f"null or {cluster.gpus_per_node}: one rank for each of the cluster.gpus_per_node={cluster.gpus_per_node}"
        yield Fault("cluster.ranks_per_node", cluster.ranks_per_node, want, "cluster.ranks_per_node=null")
    if cluster.gpu_type is not None and cluster.gpu_request == "none":
        fix = "cluster.gpu_request=gpus, or cluster.constraint=TYPE"
        yield Fault("cluster.gpu_type", cluster.gpu_type, "null while no GPUs are asked for", fix)
    for name in cluster.environment:
        if not NAME.fullmatch(name):
            yield Fault(
                f"cluster.environment.{name}", cluster.environment[name], "a variable's name", "rename it"
            )
    yield from _extra(cluster)


def _time(cluster: ClusterConfig) -> Iterator[Fault]:
    limit_s = derive.time_limit_s(cluster.time)
    if limit_s is None:
        want = "[DAYS-]HOURS:MINUTES:SECONDS or MINUTES, above 0"
        yield Fault("cluster.time", cluster.time, want, "cluster.time=1-00:00:00")
    elif cluster.warn_s + 60 >= limit_s:
        want = f"less than the {limit_s} s of cluster.time={cluster.time} by more than the 60 s that Slurm may be early"
        fix = f"cluster.warn_s={max(1, limit_s // 4)}, or a longer cluster.time"
        yield Fault("cluster.warn_s", cluster.warn_s, want, fix)


def _container(cluster: ClusterConfig) -> Iterator[Fault]:
    if cluster.container != "none" and not cluster.image:
        yield Fault("cluster.image", cluster.image, "the container's image", "cluster.image=FILE.sqsh")
    if cluster.container == "none" and cluster.image:
        fix = "cluster.container=pyxis or apptainer"
        yield Fault("cluster.image", cluster.image, "null without a container", fix)
    for mount in cluster.mounts:
        if not re.fullmatch(r"[^\s:,]+:[^\s,]+", mount):
            yield Fault("cluster.mounts", mount, "OUTSIDE:INSIDE, without spaces and commas", "/data:/data")


def _extra(cluster: ClusterConfig) -> Iterator[Fault]:
    for text in cluster.extra:
        flags = re.findall(r"(?:^|(?<=\s))(--[a-z-]+|-[A-Za-z])", text)  # -N4 is -N too
        owned = next((flag for flag in flags if flag in OWNED), None)
        if owned is not None:
            yield Fault("cluster.extra", text, f"options other than {owned}", f"{OWNED[owned]} says it")
        elif not re.fullmatch(r"--?[A-Za-z][^\n]*", text):
            yield Fault("cluster.extra", text, "an option of sbatch", 'cluster.extra=["--mail-type=FAIL"]')
