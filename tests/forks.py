"""Runs of launch/train.py on two ranks that start in 2 s and not in 10: forks of one process that has imported everything.

    with Nursery() as nursery:
        job = nursery.start(["+exp=tiny_cpu", ...], folder)
        os.kill(job.ranks[1], signal.SIGKILL)
        codes = nursery.wait(job, 60)

A job is a stand-in for torchrun, with its two ranks below it, all talking to a log. The process they are forked from takes
up orphans, so the exit code of every one is known, whoever was killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN = str(ROOT / "launch" / "train.py")
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 3.0


@dataclass
class ForkedJob:
    """Process numbers; `log` holds what all of them say."""

    launcher: int
    ranks: list[int]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 180) -> None:
        """Waits until the output holds `text`."""
        limit = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < limit, f"{text!r} did not come:\n{self.output}"
            time.sleep(0.005)


class Nursery:
    """The process that jobs are forked from; leaves none of them behind."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def start(self, arguments: Sequence[str], cwd: Path, script: str = TRAIN, **env: str) -> ForkedJob:
        """Two ranks of `script`, in `cwd`."""
        log = cwd / f"job-{time.monotonic_ns()}.log"
        pids = self._ask(arguments=list(arguments), cwd=str(cwd), script=script, env=env, log=str(log))
        return ForkedJob(pids[0], pids[1:], log)

    def wait(self, job: ForkedJob, timeout_s: float = 180) -> list[int]:
        """Exit codes of the launcher and the ranks, negative for a signal. Raises TimeoutError with the output."""
        limit = time.monotonic() + timeout_s
        while (codes := self._ask(wait=[job.launcher, *job.ranks])) is None:
            if time.monotonic() > limit:
                raise TimeoutError(f"still running after {timeout_s} s:\n{job.output}")
            time.sleep(0.02)
        return codes

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """The nursery's side."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print while they are imported is no answer
    import_everything()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ended: dict[int, int] = {}
    started: list[int] = []
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            reap(ended)
            codes = [ended.get(pid) for pid in request["wait"]]
            answer = None if None in codes else codes
        else:
            answer = start_job(request)
            started += answer
        print(json.dumps(answer), file=answers, flush=True)
    reap(ended)
    for pid in set(started) - set(ended):
        os.kill(pid, signal.SIGKILL)


def import_everything() -> None:
    """What a run imports until its first step."""
    sys.path.insert(0, str(ROOT))
    import matplotlib.pyplot
    import transformers.models.qwen3.modeling_qwen3
    import wandb

    import stack.config.compose
    import stack.engine.build
    import stack.engine.zero_init
    import stack.parallel.apply
    import stack.train.run
    from stack.patches import apply_patches

    apply_patches()  # imports what DeepSpeed asks for late, in a cheaper way
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    assert matplotlib and transformers and wandb and stack


def reap(ended: dict[int, int]) -> None:
    """Take note of the children, adopted ones too, that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        ended[pid] = os.waitstatus_to_exitcode(status)


def start_job(request: dict[str, Any]) -> list[int]:
    """Fork the launcher and, below it, the ranks; their process numbers, the launcher's first."""
    reading, writing = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        os.close(reading)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        ranks = [fork_rank(request, rank, port, writing) for rank in range(2)]
        os.write(writing, json.dumps(ranks).encode())
        os.close(writing)
        mind(ranks)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        return [launcher, *json.loads(file.read())]


def mind(ranks: list[int]) -> None:
    """The launcher's work: when a rank has failed, the others have GRACE_S to end by themselves. It leaves their exit codes
    to be read by the nursery."""
    running, limit = set(ranks), float("inf")
    while running:
        for rank in list(running):
            ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                running.remove(rank)
                limit = min(limit, time.monotonic() + GRACE_S) if ended.si_status else limit
        if time.monotonic() > limit:
            for rank in running:
                os.kill(rank, signal.SIGTERM)
            limit = float("inf")
        time.sleep(0.05)


def fork_rank(request: dict[str, Any], rank: int, port: int, inherited: int) -> int:
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    os.close(inherited)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="forked")
    sys.argv = [request["script"], *request["arguments"]]
    if os.getppid() != launcher:  # it was killed before this rank could look
        os._exit(1)
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  the interpreter's own way with an exception that nobody caught
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
