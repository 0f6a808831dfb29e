"""Runs functions on N fresh rank processes (gloo on CPU, or NCCL with one device a rank) and brings the results back.

    values = run_ranks(function, 2, arg, key=value)            # one case: the value of each rank, or the first cause raised
    outcomes = run_cases(2, {"plain": Case(function, (arg,))})  # one start of the ranks for many cases
    outcomes["plain"].get()

The function must be importable (defined at the top level of a module below `tests` or `stack`). It runs with the rank
variables set and, unless `init=False`, with the default process group up. A case that fails ends its rank processes; the
cases behind it run on fresh ones. CPU ranks are forks of a process that has only imported (`fork_ranks.py`); those with an
environment or a device of their own are new interpreters, 5 to 10 s each on a small machine.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.fork_ranks import Fork

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 580.0  # just less than a test's own limit, so that the stacks of the ranks are seen
GRACE_S = 10.0  # how long the peers of a failed rank may take to fail as well before they are ended
MAX_STARTS = 4  # broken starts before the remaining cases are given up: bounds the time of a hopeless table
LOG_LINES = 40


class RankFailure(AssertionError):
    """A rank ended without a result, or with an exception that cannot be carried over as itself."""


@dataclass
class Case:
    """One function to run on every rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a case: the value of each rank in rank order, or the first cause."""

    values: list[Any] | None = None
    error: BaseException | None = None

    def get(self) -> list[Any]:
        """The values, one a rank; raises the first cause if the case failed."""
        if self.error is not None:
            raise self.error
        assert self.values is not None
        return self.values


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = START_LIMIT_S,
    device: str = "cpu",
    init: bool = True,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on `world` ranks; returns each rank's value or raises the first cause."""
    cases = {"case": Case(function, args, kwargs)}
    return run_cases(world, cases, timeout_s=timeout_s, device=device, init=init, env=env)["case"].get()


def run_cases(
    world: int,
    cases: Mapping[str, Case],
    *,
    timeout_s: float = START_LIMIT_S,
    device: str = "cpu",
    init: bool = True,
    env: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """Runs all cases in order, on one start of `world` ranks where none fails.

    Args:
        timeout_s: limit of one start in seconds; at the limit every rank dumps all its stacks and is ended.
        init: start the default process group before each case (a case may destroy it; the next gets a new one).
        env: further environment variables of the ranks.
    """
    outcomes: dict[str, Outcome] = {}
    for _ in range(MAX_STARTS):
        pending = {name: case for name, case in cases.items() if name not in outcomes}
        if not pending:
            break
        launch = _Launch(world, pending, timeout_s, device, init, env or {})
        try:
            outcomes.update(launch.run())
        finally:
            launch.close()
    broken = RankFailure(f"not run: {MAX_STARTS} starts of the ranks were broken by the cases before it")
    return {name: outcomes.get(name, Outcome(error=broken)) for name in cases}


class _Launch:
    """One start of the ranks. The parent hosts a store on a port of the system's choice for each case, so that no two
    launches can take each other's port, and each case may start and destroy its own process group."""

    def __init__(
        self,
        world: int,
        cases: Mapping[str, Case],
        timeout_s: float,
        device: str,
        init: bool,
        env: Mapping[str, str],
    ):
        from torch.distributed import TCPStore

        self.world, self.names, self.timeout_s = world, list(cases), timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in cases]
        self.ports = [store.port for store in self.stores]
        request = (list(cases.values()), self.ports, device, init, timeout_s)
        self.folder.joinpath("request.pkl").write_bytes(pickle.dumps(request))
        self.ranks = [self._start(rank, device, env) for rank in range(world)]

    def _start(self, rank: int, device: str, env: Mapping[str, str]) -> Fork | subprocess.Popen[bytes]:
        foreign = ("SLURM", "TORCHELASTIC", "PMI", "OMPI", "CROSS_")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        clean |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.ports[0]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the parent's store instead of hosting one
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        if device == "cpu":
            clean |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        else:
            clean.pop("DS_ACCELERATOR", None)
        if device == "cpu" and not env:
            return Fork(_rank_main, self.folder, clean, self._log(rank))
        with open(self._log(rank), "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.ranks", str(self.folder)],
                env=clean | dict(env),
                cwd=ROOT,
                stdin=subprocess.PIPE,  # its end tells the rank that this process is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self) -> dict[str, Outcome]:
        """Waits for the ranks; outcomes of the finished cases and of the first failed one."""
        limit = time.monotonic() + self.timeout_s
        hung = ""
        while any(rank.poll() is None for rank in self.ranks):
            if time.monotonic() > limit:
                hung = "\nstill running at the limit; stacks are in the logs"
                self._dump_and_kill()
            elif any(rank.poll() for rank in self.ranks):
                limit = min(limit, time.monotonic() + GRACE_S)
            time.sleep(0.02)
        return self._collect(hung)

    def _collect(self, hung: str) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for index, name in enumerate(self.names):
            files = [self.folder / f"{index}-{rank}.pkl" for rank in range(self.world)]
            found = {
                rank: pickle.loads(file.read_bytes()) for rank, file in enumerate(files) if file.exists()
            }
            errors = sorted(
                (when, rank, error) for rank, (when, error, _) in found.items() if error is not None
            )
            if len(found) == self.world and not errors:
                outcomes[name] = Outcome(values=[pickle.loads(found[rank][2]) for rank in range(self.world)])
                continue
            outcomes[name] = Outcome(error=self._cause(name, found, errors, hung))
            break
        return outcomes

    def _cause(self, name: str, found: dict, errors: list, hung: str) -> BaseException:
        codes = [rank.returncode for rank in self.ranks]
        silent = [rank for rank in range(self.world) if rank not in found]
        if errors:
            _, rank, (exception, text) = errors[0]
            head = f"case {name}: rank {rank} of {self.world} failed first (exit codes {codes}){hung}\n{text}"
            error = pickle.loads(exception) if exception else RankFailure(head)
            if exception:
                error.add_note(head)
        else:
            error = RankFailure(f"case {name}: ranks {silent} gave no result (exit codes {codes}){hung}")
        for rank in silent:
            error.add_note(f"--- end of the log of rank {rank}\n{self._tail(rank)}")
        return error

    def _dump_and_kill(self) -> None:
        for number, pause in ((signal.SIGUSR1, 1.0), (signal.SIGKILL, 0.0)):
            for rank in self.ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, number)
            time.sleep(pause)
        for rank in self.ranks:
            rank.wait()

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def _tail(self, rank: int) -> str:
        return "\n".join(self._log(rank).read_text(errors="replace").splitlines()[-LOG_LINES:])

    def close(self) -> None:
        """Ends what is left, frees the ports, removes the files, also those that the ranks left in shared memory."""
        for rank in self.ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
            if isinstance(rank, subprocess.Popen):
                assert rank.stdin is not None
                rank.stdin.close()
        marks = [f"torch_{rank.pid}_" for rank in self.ranks] + [f"_{port}_" for port in self.ports]
        for file in Path("/dev/shm").glob("*"):
            if file.name.startswith(("torch_", "deepspeed_")) and any(mark in file.name for mark in marks):
                file.unlink(missing_ok=True)
        self.stores.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def _rank_main(folder: Path) -> None:
    """The rank's side: runs the cases, leaves one file for each, ends at the first that fails."""
    cases, ports, device, init, timeout_s = pickle.loads((folder / "request.pkl").read_bytes())
    rank = int(os.environ["RANK"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the parent sends it at the time limit
    for index, case in enumerate(cases):
        os.environ["MASTER_PORT"] = str(ports[index])
        value, error = None, None
        try:
            if init:
                _init(device, timeout_s)
            value = pickle.dumps(case.function(*case.args, **case.kwargs))
        except BaseException as exception:  # noqa: BLE001  whatever it is, the test gets it
            error = (_portable(exception), traceback.format_exc())
        result = pickle.dumps((time.monotonic(), error, value))
        part = folder / f"{index}-{rank}.part"
        part.write_bytes(result)
        part.rename(folder / f"{index}-{rank}.pkl")
        if error is not None:
            print(error[1], flush=True)
            os._exit(1)  # no clean-up: the peers may sit in a collective that never ends
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _init(device: str, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=timeout_s + GRACE_S)
    )


def _portable(exception: BaseException) -> bytes | None:
    """The exception as bytes, or None where it would come back as something else."""
    try:
        data = pickle.dumps(exception)
        back = pickle.loads(data)
    except Exception:  # noqa: BLE001  an exception may refuse this in any way; its text is carried in any case
        return None
    return data if type(back) is type(exception) and str(back) == str(exception) else None


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(70)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _rank_main(Path(sys.argv[1]))
