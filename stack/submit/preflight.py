"""A look at every node before training: `srun --ntasks-per-node=RANKS python -m stack.submit.preflight RUN_FOLDER`.

The first rank of each node reports what it sees to rank 0, which compares, names the bad node, and says at last what the
collectives of all ranks reached. Everything ends within PREFLIGHT_S seconds of the environment; at the limit the nodes are
named that are waited for. Exit code 0: all is well.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack.dist.env import RankEnv, read_rank_env
from stack.dist.failure import clear_errors
from stack.dist.node_list import expand_node_list
from stack.errors import LaunchError
from stack.submit.node import Report, host_name, look
from stack.submit.verdict import NotReady, compare, missing, skewed, slow, unreachable

if TYPE_CHECKING:
    from torch.distributed import Store

CONNECT_S = 10.0  # from node to node; a firewall drops, which looks like a very slow network
SHARED_S = 30.0  # some shared file systems show a new file only after their cache's time
SHARES = {"report": 0.5, "verdict": 0.75, "traffic": 0.95}
"""Part of the limit by which a stage is over."""
SHOWN = ("GPUs", "host memory", "commit", "source", "locked memory")
MARKS = "preflight"
"""Folder in the run's, with a file a node."""


class Preflight:
    """One rank's part. All ranks go through the same stages."""

    def __init__(self, env: RankEnv, folder: Path, limit_s: float):
        self.env, self.folder, self.limit_s, self.since = env, folder, limit_s, time.monotonic()
        self.nodes = expand_node_list(os.environ.get("SLURM_JOB_NODELIST", "")) or [host_name()]
        self.node = self.nodes[int(os.environ.get("SLURM_NODEID", "0"))]
        self.leads = env.local_rank == 0
        self.device = "cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else "cuda"
        job = os.environ.get("SLURM_JOB_ID", "0")
        self.token = f"{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        self.findings: dict[str, Any] = {}

    def left(self, stage: str) -> float:
        """Seconds until the stage has to be over, at least one."""
        return max(1.0, SHARES[stage] * self.limit_s - (time.monotonic() - self.since))

    def run(self) -> None:
        """Raises NotReady on the ranks that know what is wrong; the others leave with code 1."""
        env = self.env
        report = Report(self.node)
        if self.leads:
            num_gpus = env.local_world if self.device == "cuda" else 0
            report = look(num_gpus, self.folder, os.environ.get("SCRATCH", ""), len(self.nodes))
        store = self._meet()
        if self.leads:
            server = socket.create_server(("", 0), backlog=1024)
            report.notes["port"] = str(server.getsockname()[1])
            self._leave_mark(report)
            store.set(f"report/{self.node}", json.dumps(asdict(report)))
            faults = self._judge(store) if env.rank == 0 else self._take_part(store)
            server.close()
        else:
            faults = self._wait_for_verdict(store)
        if faults:
            if env.rank == 0:
                raise NotReady(faults)
            time.sleep(2)  # the first to leave ends all the others, and rank 0 has to speak first
            raise SystemExit(1)
        if env.world > 1:
            self._measure(store)

    def _meet(self) -> Store:
        from torch.distributed import DistError, TCPStore

        env = self.env
        if env.rank == 0:
            self._check_address()
        # A client waits longer than rank 0 does, which knows more.
        timeout = timedelta(seconds=self.left("verdict"))
        try:
            return TCPStore(env.addr, env.port, env.world, env.rank == 0, timeout, wait_for_workers=False)
        except (DistError, OSError) as error:
            reason = str(error).splitlines()[0]
            if env.rank == 0:
                text = f"{self.node} cannot listen on port {env.port}: {reason}. Fix: another job there? Submit again"
            else:
                text = f"{self.node} cannot reach rank 0 at {env.addr}:{env.port}: {reason}. Fix: HEAD_ADDRESS, or the network"
            raise LaunchError(text) from error

    def _check_address(self) -> None:
        """Rank 0 has to be where the others look for it. Raises LaunchError."""
        place = f"MASTER_ADDR={self.env.addr}"
        try:
            address = socket.gethostbyname(self.env.addr)
            socket.create_server((address, 0)).close()
        except socket.gaierror as error:
            raise LaunchError(
                f"{place} cannot be resolved on {self.node}: {error}. Fix: HEAD_ADDRESS"
            ) from error
        except OSError as error:
            raise LaunchError(
                f"{place} is {address}, which is no address of {self.node}, where rank 0 is ({error}). Fix: HEAD_ADDRESS, or "
                "leave it to job.sh, which takes the first node of the job"
            ) from error

    def _leave_mark(self, report: Report) -> None:
        """A file that the other nodes are to see."""
        try:
            path = self.folder / MARKS / self.node
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.token)
        except OSError as error:
            if not report.faults:
                report.faults.append(
                    f"{self.folder} cannot be written: {error}. Fix: mounts and permissions there"
                )

    def _judge(self, store: Store) -> list[str]:
        """Rank 0's part: from the reports to the verdict, which the others wait for."""
        told = self._gather(store, "report", "report")
        reports = {node: Report(**json.loads(text)) for node, text in told.items()}
        where = f"{self.env.addr}:{self.env.port}"
        faults = missing(self.nodes, list(reports), SHARES["report"] * self.limit_s, where) + compare(reports)
        if len(reports) == len(self.nodes):
            faults += self._unshared(reports) + self._clocks(store) + self._connections(store, reports)
        for node, report in reports.items():
            seen = {key: value for key, value in (report.notes | report.facts).items() if key in SHOWN}
            print(f"  {node}: {', '.join(f'{key} {value}' for key, value in seen.items())}", flush=True)
        self.findings |= {
            "faults": faults,
            "nodes": {node: asdict(report) for node, report in reports.items()},
        }
        store.set("verdict", json.dumps(faults))
        return faults

    def _gather(self, store: Store, kind: str, stage: str) -> dict[str, str]:
        """What the nodes have said, as soon as all have, or at the stage's limit; in the order of the job."""
        limit = time.monotonic() + self.left(stage)
        waited_for = list(self.nodes)
        while waited_for and time.monotonic() < limit:
            waited_for = [node for node in waited_for if not store.check([f"{kind}/{node}"])]
            time.sleep(0.05 * bool(waited_for))
        return {node: store.get(f"{kind}/{node}").decode() for node in self.nodes if node not in waited_for}

    def _unshared(self, reports: Mapping[str, Report]) -> list[str]:
        """Nodes whose mark is not seen from here."""
        limit, faults = time.monotonic() + min(SHARED_S, self.left("verdict") / 2), []
        for node, report in reports.items():
            path = self.folder / MARKS / node
            while not _reads(path, self.token) and not report.faults and time.monotonic() < limit:
                time.sleep(0.2)
            if not _reads(path, self.token) and not report.faults:
                faults.append(
                    f"{node}: what it wrote into {path.parent} is not seen from {self.node}: the folder is not shared. Fix: "
                    "`out` and cluster.work on a file system that all nodes share"
                )
        return faults

    def _clocks(self, store: Store) -> list[str]:
        """Each node says its time between two readings of rank 0's, so that a slow answer is no skew."""
        before = time.time()
        store.set("clock", "now")
        store.set(f"clock/{self.node}", str(before))
        told = {node: float(text) for node, text in self._gather(store, "clock", "verdict").items()}
        after = time.time()
        return skewed(
            {node: min(0.0, theirs - before) or max(0.0, theirs - after) for node, theirs in told.items()}
        )

    def _connections(self, store: Store, reports: Mapping[str, Report]) -> list[str]:
        """Every node to every other, all at once."""
        ports = {node: int(report.notes["port"]) for node, report in reports.items()}
        store.set("ports", json.dumps(ports))
        store.set(f"reached/{self.node}", json.dumps(self._connect(ports)))
        told = self._gather(store, "reached", "verdict")
        lost = missing(
            self.nodes, list(told), SHARES["verdict"] * self.limit_s, f"{self.env.addr}:{self.env.port}"
        )
        return lost + unreachable({node: json.loads(text) for node, text in told.items()})

    def _connect(self, ports: Mapping[str, int]) -> dict[str, str]:
        """The nodes that this one cannot connect to, with the reason."""
        failures: dict[str, str] = {}

        def attempt(node: str) -> None:
            try:
                socket.create_connection((node, ports[node]), timeout=CONNECT_S).close()
            except OSError as error:
                failures[node] = str(error)

        threads = [threading.Thread(target=attempt, args=(node,)) for node in ports if node != self.node]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failures

    def _take_part(self, store: Store) -> list[str]:
        """What the first rank of another node does for rank 0's checks, as far as those go."""
        limit = time.monotonic() + self.left("traffic")
        for key in ("clock", "ports"):
            while not store.check([key]) and not store.check(["verdict"]) and time.monotonic() < limit:
                time.sleep(0.02)
            if not store.check([key]):
                break
            if key == "clock":
                store.set(f"clock/{self.node}", str(time.time()))
            else:
                store.set(f"reached/{self.node}", json.dumps(self._connect(json.loads(store.get("ports")))))
        return self._wait_for_verdict(store)

    def _wait_for_verdict(self, store: Store) -> list[str]:
        store.wait(["verdict"], timedelta(seconds=self.left("traffic")))
        return list(json.loads(store.get("verdict")))

    def _measure(self, store: Store) -> None:
        """Collectives over all ranks; rank 0 tells their rates."""
        from stack.submit.traffic import SIZE, measure

        found = measure(store, self.env, self.nodes, self.device, self.limit_s, self.left("traffic"))
        if found is None:
            return
        own, rates = found
        mib = SIZE[self.device] >> 20
        if own:
            low, high = min(own.values()) / 1e9, max(own.values()) / 1e9
            print(
                f"  all-reduce within each node, {mib} MiB: {low:.3g} to {high:.3g} GB/s a rank", flush=True
            )
        for what, rate in rates.items():
            print(f"  {what}, {mib} MiB: {rate / 1e9:.3g} GB/s a rank", flush=True)
        for warning in slow(own):
            print(f"  warning: {warning}", flush=True)
        self.findings |= {"bytes/s within nodes": own, "bytes/s": rates}

    def save(self) -> None:
        """The findings beside the run. For rank 0."""
        self.findings["seconds"] = round(time.monotonic() - self.since, 1)
        (self.folder / "preflight.json").write_text(json.dumps(self.findings, indent=1) + "\n")


def _reads(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False


def main() -> None:
    """Rank variables come from srun; PREFLIGHT_S, SCRATCH and DS_ACCELERATOR from the job's script."""
    with clear_errors():
        env = read_rank_env(os.environ)
        preflight = Preflight(env, Path(sys.argv[1]), float(os.environ.get("PREFLIGHT_S", "120")))
        try:
            preflight.run()
        finally:
            if env.rank == 0:
                with suppress(OSError):  # a folder that cannot be written is among the faults already
                    preflight.save()
        if env.rank == 0:
            seconds = time.monotonic() - preflight.since
            print(
                f"preflight: {len(preflight.nodes)} node(s), {env.world} rank(s) are fine ({seconds:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
