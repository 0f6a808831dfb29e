"""launch/slurm with fakes of Slurm's commands and of the launchers: addresses, ranks, quoting, and the life of a job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

SLURM = Path(__file__).resolve().parent.parent.parent / "launch" / "slurm"
FAKES = {
    # Slurm ends the batch shell of a job that it queues again.
    "scontrol": """echo "scontrol $*" >> "$CALLS"
case "$1 $2" in
"show hostnames") [ "$3" = "a[01-03,07],b1" ] && printf "%s\\n" a01 a02 a03 a07 b1 ;;
"requeue $WHOLE") [ -z "$NO_REQUEUE" ] && kill -KILL $PPID ;;
*) echo "JobId=$SLURM_JOB_ID JobState=${JOB_STATE:-RUNNING}" ;;
esac""",
    # Every task gets its own number, and one failing task fails the step.
    "srun": """echo "srun $*" >> "$CALLS"
while [ "$1" != bash ]; do shift; done
rc=0
for node in 0 1 2 3 4; do SLURM_NODEID=$node "$@" || rc=$?; done
exit $rc""",
    "sbatch": 'echo "sbatch $* CHAINED=$CHAINED" >> "$CALLS"; echo 777',
    "scancel": 'echo "scancel $*" >> "$CALLS"',
    # The early warning of the time limit is for the ranks below, and a launcher would die of it.
    "torchrun": """kill -USR1 $$
printf "<%s>" "$@"; echo
if [ "$SLURM_NODEID" = 0 ]; then eval "$BEHAVIOUR"; fi
[ "$SLURM_NODEID" != "$FAILING_NODE" ]""",
    "python": """case "$*" in
"-m stack.submit.folder"*) echo "$PWD/run" ;;
"-m stack.submit.preflight "*) eval "${PREFLIGHT:-}"; exit "$PREFLIGHT_CODE" ;;
*) exec torchrun "$@" ;;
esac""",
}
STOP = 'echo "{\\"reason\\": \\"%s\\"}" > run/stopped.json'
SAVE = "mkdir -p run/checkpoints/step_%06d"


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A folder as a project's, with the fakes before everything on the PATH."""
    for name, body in FAKES.items() | {("deepspeed", FAKES["torchrun"])}:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "slurm").symlink_to(SLURM)
    return {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "WHOLE": "123456",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "a[01-03,07],b1",
        "SLURM_NNODES": "5",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "64",
        "FAILING_NODE": "none",
        "PREFLIGHT_CODE": "0",
        "BEHAVIOUR": "",
        "SCRIPT": "job.sbatch",
        "RESTART": "none",
    }


def start(environ: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SLURM / "train.sbatch"), *overrides],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def events(cluster: dict[str, str]) -> list[str]:
    return [record["event"] for record in records(cluster)]


def records(cluster: dict[str, str]) -> list[dict[str, Any]]:
    path = Path(cluster["SLURM_SUBMIT_DIR"], "run", "job.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def calls(cluster: dict[str, str], command: str) -> list[str]:
    lines = Path(cluster["CALLS"]).read_text().splitlines()
    return [line.removeprefix(f"{command} ") for line in lines if line.startswith(f"{command} ")]


def live(cluster: dict[str, str], *behaviours: str, **more: str) -> list[int]:
    """Starts the job with one behaviour of node 0 after the other, as long as Slurm would; the codes of the starts."""
    codes = []
    for number, behaviour in enumerate(behaviours):
        restart = {"SLURM_RESTART_COUNT": str(number)} if number else {}
        ended = start({**cluster, "RESTART": "requeue", **more, **restart, "BEHAVIOUR": behaviour})
        codes.append(ended.returncode)
        if ended.returncode != -signal.SIGKILL:
            break
    return codes


COMMON = "<--master-addr=a01><--master-port=23456>"


@pytest.mark.parametrize(
    ("launcher", "tasks", "want"),
    [
        (
            "torchrun",
            1,
            f"<--nnodes=5><--node-rank=NODE><--nproc-per-node=8>{COMMON}<--shutdown-timeout=600>",
        ),
        (
            "deepspeed",
            1,
            "<--quiet><--hostfile=RUN/hostfile><--no_ssh><--node_rank=NODE>" + COMMON.replace("r-", "r_"),
        ),
        ("srun", 8, "<-u>"),
    ],
)
def test_each_node_gets_its_launcher(launcher: str, tasks: int, want: str, cluster: dict[str, str]) -> None:
    overrides = ["+exp=qwen3_1m", "name=a b", "engine.overrides={a:1,b:2}", "optim.lr=1e-5", "optim.lr=2e-5"]
    ended = start({**cluster, "LAUNCHER": launcher, "PREFLIGHT_S": "0"}, *overrides)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    project = cluster["SLURM_SUBMIT_DIR"]
    tail = f"<{project}/launch/train.py>" + "".join(f"<{text}>" for text in overrides)
    want = want.replace("RUN", f"{project}/run") + tail
    got = [line for line in ended.stdout.splitlines() if line.startswith("<")]
    assert got == [want.replace("NODE", str(node)) for node in range(5)]
    (step,) = calls(cluster, "srun")
    assert step.startswith(
        f"--ntasks-per-node={tasks} --ntasks={5 * tasks} --cpus-per-task={64 // tasks} --export=ALL "
    )
    assert Path(project, "run", "hostfile").read_text().split("\n")[:2] == ["a01 slots=8", "a02 slots=8"]


def test_jobs_and_restarts_have_ports_of_their_own(cluster: dict[str, str]) -> None:
    again = [{}, {"SLURM_JOB_ID": "123457"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "9999"}]
    for changes in again:
        start({**cluster, **changes})
    assert [r["address"] for r in records(cluster) if r["event"] == "start"] == [
        f"a01:{port}" for port in (23456, 23457, 24456, 29999)
    ]


def test_port_in_use_is_passed_over(cluster: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here = {"HEAD_ADDRESS": "127.0.0.1", "SLURM_JOB_ID": str(port % 10000)}
        if not 20000 <= port < 30000:  # the system's own ports lie elsewhere: take one of the range
            taken.close()
            with socket.create_server(("127.0.0.1", 20000 + port % 10000)):
                ended = start({**cluster, **here})
        else:
            ended = start({**cluster, **here})
    assert ended.returncode == 0 and "is in use, trying the next" in ended.stdout
    assert records(cluster)[0]["address"] == f"127.0.0.1:{20000 + (port + 1) % 10000}"


def test_fewer_cpus_than_ranks(cluster: dict[str, str]) -> None:
    """Slurm refuses them unless it is told to share."""
    start({**cluster, "SLURM_CPUS_ON_NODE": "1"})
    assert [" --overcommit " in step for step in calls(cluster, "srun")] == [True, False]


def test_gpus_that_deepspeed_would_not_take(cluster: dict[str, str]) -> None:
    ended = start({**cluster, "RANKS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "4,5"})
    assert (
        ended.returncode == 2 and "deepspeed would take 0,1. Fix: cluster.launcher=torchrun" in ended.stderr
    )
    for fine in ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "4,5", "LAUNCHER": "torchrun"}):
        assert start({**cluster, "RANKS_PER_NODE": "2", **fine}).returncode == 0


def test_failures_are_passed_on(cluster: dict[str, str], tmp_path: Path) -> None:
    assert start({**cluster, "FAILING_NODE": "3"}).returncode == 1
    assert events(cluster) == ["start", "failed"]
    assert start({**cluster, "SLURM_JOB_NODELIST": "unknown"}).returncode != 0
    for wrong in ({"LAUNCHER": "mpirun"}, {"RESTART": "always"}, {"RESTART": "chain", "SCRIPT": ""}):
        ended = start({**cluster, **wrong})
        assert ended.returncode == 2 and ": expected " in ended.stdout
    (tmp_path / "launch" / "slurm").unlink()
    ended = start(cluster)
    assert ended.returncode == 2 and "submit from the project's folder" in ended.stderr


KILLED = -signal.SIGKILL  # by Slurm, which starts the job anew


@pytest.mark.parametrize(
    ("behaviours", "codes", "want"),
    [
        (["", ""], [0], ["start", "done"]),
        # without progress: two starts
        (["exit 3"] * 5, [KILLED, 1], ["start", "failed", "goes on", "start", "failed", "gave_up"]),
        # each start gets further, until two do not
        (
            [f"{SAVE % 2}; exit 3", f"{SAVE % 4}; exit 3", "exit 3", "exit 3"],
            [KILLED, KILLED, KILLED, 1],
            [*["start", "failed", "goes on"] * 3, "start", "failed", "gave_up"],
        ),
        # a lost node ends the shell without a word; the third start does not try any more
        (["kill -KILL $BATCH"] * 3, [KILLED, KILLED, 1], ["start", "start", "gave_up"]),
        (["kill -KILL $BATCH", f"{SAVE % 9}; kill -KILL $BATCH", ""], [KILLED, KILLED, 0], ["start"] * 3 + ["done"]),
        # asked to stop, as often as it may be
        (
            [f"sleep 0.01; {SAVE % step}; {STOP % 'SIGUSR1'}" for step in (1, 2, 3)] + ["rm run/stopped.json"],
            [KILLED] * 3 + [0],
            ["start", "goes on"] * 3 + ["start", "done"],
        ),
        # asked to stop before it could make a step: a time limit that is too short
        ([f"sleep 0.01; {STOP % 'SIGUSR1'}"] * 5, [KILLED, 1], ["start", "goes on", "start", "gave_up"]),
    ],
)  # fmt: skip
def test_life(behaviours: list[str], codes: list[int], want: list[str], cluster: dict[str, str]) -> None:
    # BATCH: srun, and timeout above it, are between the launcher and the batch shell
    find = "BATCH=$(ps -o ppid= $(ps -o ppid= $(ps -o ppid= $PPID))); "
    behaviours = [(find if "$BATCH" in text else "") + text for text in behaviours]
    assert live(cluster, *behaviours, PREFLIGHT_S="0") == codes
    assert events(cluster) == want


def test_preemption_goes_on_and_scancel_ends(cluster: dict[str, str]) -> None:
    stop = f"sleep 0.01; {STOP % 'SIGTERM'}; exit 143"
    assert live(cluster, stop, "rm run/stopped.json") == [KILLED, 0]
    assert live(cluster, stop, "rm run/stopped.json", JOB_STATE="COMPLETING Reason=TimeLimit") == [KILLED, 0]
    assert live(cluster, stop, JOB_STATE="COMPLETING") == [0]
    assert live(cluster, "exit 143", JOB_STATE="COMPLETING") == [143]
    assert events(cluster) == ["start", "goes on", "start", "done"] * 2 + [
        "start",
        "stopped",
        "start",
        "failed",
    ]


def test_preemption_during_the_preflight_goes_on(cluster: dict[str, str]) -> None:
    batch = "$(ps -o ppid= $(ps -o ppid= $(ps -o ppid= $PPID)))"
    preempted = f"kill -TERM {batch}; until grep -q 'show job' \"$CALLS\"; do sleep 0.02; done"
    bad = {"PREFLIGHT": f'[ -n "${{SLURM_RESTART_COUNT:-}}" ] || {{ {preempted}; exit 143; }}'}
    assert live(cluster, "", "", **bad) == [KILLED, 0]
    assert events(cluster) == ["start", "goes on", "start", "done"]
    Path(cluster["CALLS"]).unlink()
    assert live(cluster, "", JOB_STATE="COMPLETING", **bad) == [0]
    assert events(cluster)[4:] == ["start", "stopped"]


def test_count_that_was_cut_short(cluster: dict[str, str], tmp_path: Path) -> None:
    """By the loss of the node that wrote it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "starts").touch()
    assert live(cluster, "exit 3", "") == [KILLED, 0]


def test_what_gave_up_may_be_submitted_again(cluster: dict[str, str]) -> None:
    assert live(cluster, "exit 3", "exit 3", MAX_FAILURES="1") == [1]
    assert live(cluster, "exit 3", MAX_FAILURES="1", SLURM_JOB_ID="123457") == [1]
    assert events(cluster) == ["start", "failed", "gave_up"] * 2


def test_warning_is_handed_to_the_ranks(cluster: dict[str, str]) -> None:
    """The batch shell alone gets the signal of --signal=B:; the ranks save, and the job is queued again."""
    batch = "$(ps -o ppid= $(ps -o ppid= $(ps -o ppid= $PPID)))"
    warned = f"kill -USR1 {batch}; until grep -q 'scancel --signal=USR1' \"$CALLS\"; do sleep 0.02; done; {STOP % 'SIGUSR1'}"
    assert live(cluster, warned, "rm run/stopped.json") == [KILLED, 0]
    assert calls(cluster, "scancel") == ["--signal=USR1 123456"]


def test_array_task_speaks_for_itself_alone(cluster: dict[str, str]) -> None:
    """One task has the array's number as its job's, and a signal to that number would reach them all."""
    task = {"SLURM_ARRAY_JOB_ID": "123456", "SLURM_ARRAY_TASK_ID": "2", "WHOLE": "123456_2"}
    batch = "$(ps -o ppid= $(ps -o ppid= $(ps -o ppid= $PPID)))"
    warned = f'kill -USR1 {batch}; until grep -q scancel "$CALLS"; do sleep 0.02; done; {SAVE % 1}; {STOP % "SIGUSR1"}'
    assert live(cluster, warned, "rm run/stopped.json", **task) == [KILLED, 0]
    assert calls(cluster, "scancel") == ["--signal=USR1 123456_2"]
    assert {record["job"] for record in records(cluster)} == {"123456_2"}


def test_requeue_that_is_forbidden_is_told(cluster: dict[str, str]) -> None:
    stop = f"sleep 0.01; {STOP % 'SIGUSR1'}"
    ended = start({**cluster, "RESTART": "requeue", "NO_REQUEUE": "1", "BEHAVIOUR": stop})
    assert ended.returncode == 1 and "cluster.restart=chain" in ended.stdout
    assert events(cluster)[-1] == "not requeued"


def test_chain(cluster: dict[str, str]) -> None:
    """The next job is there from the start, counts on, and is taken back when nothing is left to do."""
    chain = {**cluster, "RESTART": "chain"}
    stop = f"sleep 0.01; {SAVE % 1}; {STOP % 'SIGUSR1'}"
    assert start({**chain, "BEHAVIOUR": stop}, "seed=1").returncode == 0
    (command,) = calls(cluster, "sbatch")
    assert command == "--parsable --export=ALL --dependency=afterany:123456 job.sbatch seed=1 CHAINED=123456"
    assert records(cluster)[0]["next"] == "777"
    assert "scancel" not in Path(cluster["CALLS"]).read_text()
    follower = {**chain, "SLURM_JOB_ID": "777", "CHAINED": "123456"}
    assert start({**follower, "BEHAVIOUR": "exit 3"}).returncode == 3
    assert start({**follower, "SLURM_JOB_ID": "778", "BEHAVIOUR": "exit 3"}).returncode == 1
    assert events(cluster)[-1] == "gave_up" and calls(cluster, "scancel") == ["777"]
    assert start({**follower, "SLURM_JOB_ID": "779", "BEHAVIOUR": ""}).returncode == 1
    assert calls(cluster, "sbatch")[-1].endswith("CHAINED=123456")


def test_bad_nodes_start_no_training(cluster: dict[str, str]) -> None:
    assert live(cluster, "", PREFLIGHT_CODE="1") == [1]
    assert events(cluster) == ["start", "preflight failed"]
    assert calls(cluster, "srun")[0].startswith("--ntasks-per-node=8 ")
    assert Path(cluster["CALLS"]).read_text().count("srun") == 1


def test_directives_come_before_the_first_command() -> None:
    lines = (SLURM / "train.sbatch").read_text().splitlines()
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [index for index, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert len(directives) == 7 and max(directives) < first_command
