"""What one node says of itself before training: facts to compare with the other nodes, and faults that it finds alone."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from stack.config.derive import REPO_ROOT

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "hydra-core",
)
SOURCES = ("stack", "launch", "conf", "ds_configs")
MIN_SHM_GIB = 0.5  # NCCL and data workers share memory there; containers come with 64 MiB
MIN_DISK_GIB = 1.0
MAX_GPU_USED_GIB = 1.0  # a driver alone takes less
LIMIT_S = 30.0  # nvidia-smi on a node whose GPU has failed may hang for ever
GIB = 1 << 30


@dataclass
class Report:
    """facts: what has to be the same everywhere. notes: for people. faults: what is wrong with this node alone."""

    host: str
    facts: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def look(num_gpus: int, folder: Path, scratch: str, nodes: int) -> Report:
    """num_gpus: ranks on this node, which want a GPU each; 0 on the CPU. folder: of the run. scratch: "" for none."""
    report = Report(host_name())
    report.facts["python"] = platform.python_version()
    for name in PACKAGES:
        report.facts[name] = _version(name)
    report.facts["source"] = source_hash(REPO_ROOT)
    report.notes["commit"] = _commit(REPO_ROOT)
    _look_at_name(report, nodes)
    _look_at_memory(report)
    for name, path in (("run folder", str(folder)), ("cluster.scratch", scratch)):
        if path:
            _look_at_folder(report, name, Path(path))
    if num_gpus:
        _look_at_gpus(report, num_gpus)
    else:
        report.notes["GPUs"] = "not looked at, the ranks run on the CPU"
    return report


def host_name() -> str:
    """As Slurm calls this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def source_hash(root: Path) -> str:
    """Of the code and settings of this project, whatever version control says."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".yaml", ".json", ".sh") and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _commit(root: Path) -> str:
    if shutil.which("git") is None or not (root / ".git").exists():
        return "unknown"
    asked = _run(["git", "-C", str(root), "-c", "safe.directory=*", "rev-parse", "--short=12", "HEAD"])
    return asked.stdout.strip() if asked is not None and asked.returncode == 0 else "unknown"


def _look_at_name(report: Report, nodes: int) -> None:
    """A name that means the loopback on its own node is what gloo and NCCL then tell the others to connect to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        report.faults.append(
            f"its own name {name} cannot be resolved ({error}). Fix: /etc/hosts or the name server"
        )
        return
    report.notes["address"] = address
    if nodes > 1 and address.startswith("127."):
        report.faults.append(
            f"its own name {name} means {address} here, which other nodes cannot reach. Fix: /etc/hosts, or name the network "
            "by cluster.interface"
        )


def _look_at_memory(report: Report) -> None:
    import psutil

    report.notes["host memory"] = f"{psutil.virtual_memory().available / GIB:.0f} GiB free"
    size = shutil.disk_usage("/dev/shm").total / GIB
    if size < MIN_SHM_GIB:
        report.faults.append(
            f"/dev/shm has {size:.2f} GiB, expected {MIN_SHM_GIB} or more. Fix: the container's or the node's shm size"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        report.notes["locked memory"] = (
            f"limited to {soft / GIB:.2f} GiB: InfiniBand and pinned memory want no limit"
        )


def _look_at_folder(report: Report, name: str, path: Path) -> None:
    probe = path / f".preflight-{report.host}-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
        free = shutil.disk_usage(path).free / GIB
    except OSError as error:
        report.faults.append(
            f"the {name} {path} cannot be written: {error}. Fix: mounts and permissions of this node"
        )
        return
    if free < MIN_DISK_GIB:
        report.faults.append(f"the {name} {path} has {free:.2f} GiB left. Fix: free some space")


def _look_at_gpus(report: Report, num_gpus: int) -> None:
    query = "index,name,memory.used,memory.total,ecc.errors.uncorrected.volatile.total,driver_version"
    if shutil.which("nvidia-smi") is None:
        report.faults.append(
            f"{num_gpus} GPUs are expected and there is no nvidia-smi. Fix: the driver, or the container"
        )
        return
    asked = _run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    if asked is None or asked.returncode:
        said = f"no answer within {LIMIT_S:.0f} s" if asked is None else (asked.stdout + asked.stderr).strip()
        report.faults.append(f"nvidia-smi failed: {said}. Fix: a GPU that is lost wants a reboot of the node")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in asked.stdout.splitlines() if line.strip()]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(rows) > num_gpus and all(text.isdigit() for text in allowed):
        rows = [row for row in rows if row[0] in allowed]  # the others belong to other jobs
    if len(rows) < num_gpus:
        report.faults.append(
            f"{len(rows)} GPU(s) visible, {num_gpus} expected. Fix: see nvidia-smi and dmesg there"
        )
    for index, _, used, _, errors, _ in rows:
        if used.isdigit() and int(used) / 1024 > MAX_GPU_USED_GIB:
            held = f"{int(used) / 1024:.1f} GiB in use"
            report.faults.append(
                f"GPU {index} has {held} before the start. Fix: end what holds it (nvidia-smi)"
            )
        if errors.isdigit() and int(errors):
            report.faults.append(
                f"GPU {index} has {errors} uncorrected ECC error(s). Fix: reset it, or leave the node out"
            )
    kinds = sorted({f"{name} {total} MiB" for _, name, _, total, _, _ in rows})
    report.facts["GPUs"] = f"{len(rows)} x {' and '.join(kinds)}"
    report.facts["driver"] = ", ".join(sorted({row[5] for row in rows}))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """None: it did not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
