"""A Slurm cluster on this machine, without systemd and without touching its configuration: every file lies in a folder of
its own, every process is ended by its recorded number.

    with Cluster(nodes=2) as cluster:
        job = cluster.submit("job.sbatch")
        ended = cluster.wait(job, 60)

A node is a network namespace on a bridge, with one slurmd below a process of its own (`node.sh`). Several clusters may be up
at once: each takes a free number, from which its bridge, subnet 10.213.NUMBER.0/24 and ports follow.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "ip", "unshare")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")

# Reasons, each of them met: cred_expire is also how long a requeued job is held, 120 s by default, and below 5 not heeded;
# a job that ended stays known (MinJobAge); a lost node is told after 10 s and not 300; %n keeps the daemons of two nodes
# apart; GPUs and CPUs may be made up (config_overrides).
CONF = """\
ClusterName=lab
SlurmctldHost=localhost({address})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmctldTimeout=10
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MinJobAge=3600
EnforcePartLimits=ALL
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
"""


def missing() -> str | None:
    """Why no cluster can be started here, None if one can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    lacking = [name for name in COMMANDS if shutil.which(name) is None]
    if lacking:
        packages = "slurmctld slurmd slurm-client munge iproute2"
        return f"no {', '.join(lacking)}: apt-get install --no-install-recommends {packages}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Ended:
    """A job that is over. code: its exit code, 128 + the signal that ended it."""

    state: str
    code: int
    restarts: int


class Cluster:
    """Nodes node1, node2, ... with `cpus` each. extra: further lines of slurm.conf, which win over those above."""

    def __init__(self, nodes: int = 2, cpus: int = 2, extra: str = ""):
        self.nodes, self.cpus, self.extra = nodes, cpus, extra
        self.folder = Path(
            tempfile.mkdtemp(prefix="slurm-")
        )  # short: a socket's path has to be below 108 bytes
        self.folder.chmod(0o755)  # munge's clients must be able to search it
        self.number = 0
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: dict[str, int] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            # whatever it was, nothing may be left running
            self.stop()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def environ(self) -> dict[str, str]:
        """For Slurm's commands."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    # Start and stop

    def _start(self) -> None:
        for name in ("munge", "state", "spool", "log"):
            (self.folder / name).mkdir()
        self._take_number()
        self._write_conf()
        munge = self.folder / "munge"
        key = munge / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        files = {
            "key": key,
            "socket": munge / "munge.sock",
            "pid": munge / "munged.pid",
            "seed": munge / "munged.seed",
        }
        log = f"--log-file={munge / 'munged.log'}"
        options = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
        self._call("munged", *options, log, "--num-threads=2")
        self._daemons["munged"] = int(files["pid"].read_text())
        self._call("slurmctld", "-f", str(self.folder / "slurm.conf"), cwd=self.folder)
        pid = self.folder / "slurmctld.pid"
        _until(
            lambda: pid.exists() and bool(pid.read_text().strip()), 20, lambda: "slurmctld wrote no pid file"
        )
        self._daemons["slurmctld"] = int(pid.read_text())
        for name in self.names:
            self.boot(name)
        self.wait_idle(30)

    def _take_number(self) -> None:
        """A bridge of this cluster's own; that making it succeeds is what reserves the number."""
        for number in random.sample(range(1, 250), 20):
            bridge = f"slb{number}"
            made = subprocess.run(
                ["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, text=True, check=False
            )
            if made.returncode == 0:
                self.number = number
                self._call("ip", "address", "add", f"{self.address}/24", "dev", bridge)
                self._call("ip", "link", "set", bridge, "up")
                return
        raise RuntimeError(f"no bridge could be made: {made.stderr}")

    @property
    def address(self) -> str:
        return f"10.213.{self.number}.1"

    def _write_conf(self) -> None:
        lines = [CONF.format(folder=self.folder, address=self.address, port=16000 + self.number)]
        hosts = ["127.0.0.1 localhost", f"{self.address} {socket.gethostname()}"]
        for index, name in enumerate(self.names):
            place = f"10.213.{self.number}.{11 + index}"
            hosts.append(f"{place} {name}")
            lines.append(
                f"NodeName={name} NodeHostname={name} NodeAddr={place} Port=17000 CPUs={self.cpus} RealMemory=8000 "
                "State=UNKNOWN\n"
            )
        lines.append(
            f"PartitionName=debug Nodes=node[1-{self.nodes}] Default=YES MaxTime=INFINITE State=UP\n"
        )
        (self.folder / "slurm.conf").write_text("".join(lines) + self.extra + "\n")
        # slurmd loads a cgroup plugin even where nothing uses it; naming one skips a detection that fails in namespaces.
        version = re.search(r"(\d+\.\d+)", self._call("slurmd", "-V"))
        assert version is not None
        plugin = "cgroup/v1" if float(version[1]) < 23.11 else "disabled"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")

    def stop(self) -> None:
        """Power the nodes off under whatever runs there, end the daemons, remove namespaces, bridge and folder."""
        for name in list(self._nodes):
            self.crash(name)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._daemons.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            with suppress(AssertionError):
                _until(lambda: not any(map(_alive, self._daemons.values())), 5, str)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", self._space(name)], capture_output=True, check=False)
        if self.number:
            subprocess.run(["ip", "link", "delete", f"slb{self.number}"], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    # What happens to nodes

    def _space(self, name: str) -> str:
        return f"slb{self.number}-{name}"

    def boot(self, name: str) -> None:
        """Switch a node on."""
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        (self.folder / f"slurmd.{name}.pid").unlink(missing_ok=True)
        space, index = self._space(name), int(name.removeprefix("node"))
        if not Path("/run/netns", space).exists():
            plug = f"sl{self.number}v{index}"
            self._call("ip", "netns", "add", space)
            self._call(*f"ip link add {plug} type veth peer name eth0 netns {space}".split())
            self._call(*f"ip link set {plug} master slb{self.number} up".split())
            self._call(*f"ip -n {space} link set lo up".split())
            self._call(*f"ip -n {space} address add 10.213.{self.number}.{10 + index}/24 dev eth0".split())
            self._call(*f"ip -n {space} link set eth0 up".split())
        apart = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
        init = ["bash", str(Path(__file__).parent / "node.sh"), name, str(self.folder)]
        with open(self.folder / "log" / f"{name}.init", "ab") as log:
            self._nodes[name] = subprocess.Popen(
                ["ip", "netns", "exec", space, *apart, *init],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={key: value for key, value in os.environ.items() if not key.startswith("SLURM")},
            )

    def crash(self, name: str) -> None:
        """Power off: every process of the node is gone at once, without a word on the network."""
        node = self._nodes.pop(name)
        node.kill()
        node.wait()

    def cut(self, name: str) -> None:
        """Unplug the network."""
        self._call("ip", "link", "set", f"sl{self.number}v{name.removeprefix('node')}", "down")

    def join(self, name: str) -> None:
        """Plug it in again."""
        self._call("ip", "link", "set", f"sl{self.number}v{name.removeprefix('node')}", "up")

    def inside(self, name: str, *command: str) -> str:
        """Run a command on a node, as its administrator would."""
        return self._call(*self.enter(name), *command)

    def enter(self, name: str) -> list[str]:
        """What runs the command behind it on a node."""
        init = self._pids(name, f"node.sh\0{name}\0".encode())[-1]  # the first is unshare, still outside
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        return ["nsenter", f"--target={init}", *spaces]

    def _pids(self, name: str, word: bytes) -> list[int]:
        """Processes of a node with `word` in their arguments, which end in zeros; oldest first."""
        found = []
        for pid in map(int, self._call("ip", "netns", "pids", self._space(name)).split()):
            with suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return sorted(found)

    def pids(self, name: str, job: str, word: str) -> list[int]:
        """Processes of a job on a node whose command line has `word`, oldest first."""
        found = []
        for pid in self._pids(name, word.encode()):
            with suppress(OSError):
                if f"SLURM_JOB_ID={job}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def wait_idle(self, limit_s: float) -> None:
        """All nodes are up and nothing runs."""

        def idle() -> bool:
            return (
                self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").stdout.split().count("idle")
                == self.nodes
            )

        _until(idle, limit_s, lambda: f"nodes are not idle:\n{self.run('sinfo', '-N', '-l').stdout}")

    # Jobs

    def run(
        self,
        *command: str,
        cwd: Path | None = None,
        limit_s: float = 60,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, or one that calls them."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.environ | dict(env or {}),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def submit(self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """arguments: options of sbatch, the script, its arguments. The number of the job."""
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, name -> value."""
        done = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", done.stdout))

    def wait_for(self, job: str, states: Sequence[str], limit_s: float) -> str:
        """Until the job is in one of the states; which one it is. Raises AssertionError with what Slurm says."""
        _until(
            lambda: self.show(job).get("JobState") in states,
            limit_s,
            lambda: f"not {states}: {self.show(job)}",
        )
        return self.show(job)["JobState"]

    def wait(self, job: str, limit_s: float) -> Ended:
        """Until the job is over."""
        self.wait_for(job, OVER, limit_s)
        shown = self.show(job)
        code, number = map(int, shown["ExitCode"].split(":"))
        return Ended(shown["JobState"], 128 + number if number else code, int(shown["Restarts"]))

    def _call(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(command, cwd=cwd, env=self.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout


def _until(holds: Callable[[], bool], limit_s: float, otherwise: Callable[[], str]) -> None:
    limit = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < limit, otherwise()
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
