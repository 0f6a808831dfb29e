"""`launch/submit.py` with fakes of sbatch and squeue: arguments, the written script, lints, arrays, status."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from stack.config.cluster_checks import cluster_faults
from stack.config.compose import CONF, compose_config, expand_sweep
from stack.config.derive import REPO_ROOT, time_limit_s
from stack.config.schema import RunConfig
from stack.config.schema_cluster import ClusterConfig
from stack.errors import ConfigError, LaunchError
from stack.submit import batch, record
from stack.submit.arguments import read_arguments, sweep_runs
from stack.submit.environment import NETWORKS, container_lines, environment_lines
from stack.submit.script import Task, train_script
from stack.submit.status import describe
from stack.submit.submit import submit

FAKES = {
    "sbatch": """echo "$*" >> "$CALLS"
[ "$1" = --test-only ] && { echo "sbatch: Job 8 to start at once" >&2; [ -z "$REFUSE" ]; exit; }
echo $((100 + $(grep -vc test-only "$CALLS")));cluster""",
    "squeue": '[ -n "$QUEUE" ] && echo "$QUEUE"',
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to submit from, on a login node."""
    for name, body in FAKES.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{body.replace(';cluster', '')}\n")
        file.chmod(0o755)
    work = tmp_path / "work place"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").touch()
    return work


def said(*arguments: str) -> str:
    lines: list[str] = []
    submit(read_arguments(arguments), lines.append)
    return "\n".join(lines)


def calls(place: Path) -> list[str]:
    return (place.parent / "calls").read_text().splitlines()


RUN = ("+exp=qwen3_1m", "cluster=slurm", "cluster.nodes=2")


def test_run_is_checked_written_linted_submitted_and_told(place: Path) -> None:
    told = said(*RUN, "name=one", "data.seq_len=2048")
    folder = place / "runs" / "one"
    script = (folder / "job.sbatch").read_text()
    assert f'#SBATCH --output="{folder}/slurm-%j.out"' in script
    for option in (
        "--nodes=2",
        "--gpus-per-node=8",
        "--requeue",
        "--signal=B:USR1@600",
        "--open-mode=append",
    ):
        assert f"#SBATCH {option}\n" in script
    assert calls(place) == [f"--test-only {folder}/job.sbatch", f"--parsable {folder}/job.sbatch"]
    assert "submitted: job 101" in told and f"{folder}/slurm-101.out" in told and "16 rank" not in told
    assert [event.name for event in record.read_record(folder)] == ["submitted"]


def test_dry_stops_before_submission(place: Path) -> None:
    told = said(*RUN, "dry=true")
    assert "not submitted" in told and [call.split()[0] for call in calls(place)] == ["--test-only"]
    assert not (place / "runs" / "qwen3_1m" / "job.jsonl").exists()


def test_refusals(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="a cluster to submit to"):
        said("+exp=qwen3_1m")
    with pytest.raises(ConfigError, match=r"parallel.sp=32.*a divisor of the 16 rank"):
        said(*RUN, "parallel.sp=32")
    with pytest.raises(ConfigError, match="whose ranks would leave them idle"):
        said(*RUN, "site.device=cpu", "engine.precision=fp32")
    with pytest.raises(ConfigError, match=r"cluster=.none"):
        said("+exp=tiny_cpu")
    with pytest.raises(LaunchError, match="no valid shell script"):
        said(*RUN, 'cluster.setup=["if true"]')
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(LaunchError, match="the cluster would refuse"):
        said(*RUN)
    assert all(call.startswith("--test-only") for call in calls(place))


def test_forecast_is_asked(place: Path) -> None:
    assert "forecast: fits, " in said(*RUN, "site=h100x8", "dry=true")
    assert "forecast: unproven, " in said(*RUN, "dry=true")
    large = (*RUN, "site=a100x8", "data.seq_len=4194304", "dry=true")
    with pytest.raises(LaunchError, match=r"qwen3_1m does not fit: .*(?s:.*)plan\.gate=warn"):
        said(*large)
    assert "forecast: does not fit, " in said(*large, "plan.gate=warn")
    assert "forecast:" not in said(*large, "plan.gate=off")


def test_second_job_in_a_run_folder_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said(*RUN)
    monkeypatch.setenv("QUEUE", "RUNNING|node[1-2]|0:42")
    with pytest.raises(LaunchError, match=r"belongs to job 101 \(RUNNING on node\[1-2\] for 0:42\)"):
        said(*RUN)
    record.append(place / "runs" / "qwen3_1m", "gave_up", "101", "now")
    assert "submitted: job 102" in said(*RUN)


def test_chained_job_counts_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a chain is over and the next one waits."""
    monkeypatch.setattr("stack.submit.batch.state_of", lambda job: "PENDING" if job == "777" else None)
    folder = place / "runs" / "qwen3_1m"
    folder.mkdir(parents=True)
    record.append(folder, "start", "101", "now", next="777")
    record.append(folder, "goes on", "101", "now")
    with pytest.raises(LaunchError, match=r"belongs to job 777 \(PENDING\)"):
        said(*RUN)
    assert "job 777: PENDING" in describe(folder, lambda job: "PENDING" if job == "777" else None)


def test_interrupted_submission_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what the cluster has taken by then."""
    true = batch._run

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if "--parsable" in command:
            raise KeyboardInterrupt
        return true(command)

    monkeypatch.setattr(batch, "_run", run)
    with pytest.raises(LaunchError, match=r"job\.sbatch may be queued\. Fix: squeue --me"):
        said(*RUN)


def test_relative_paths_are_judged_where_the_job_runs(place: Path) -> None:
    work = place.parent / "shared"
    work.mkdir()
    (work / "books.txt").write_text("text")
    text = (*RUN, "data=text", "data.path=books.txt", "model.tokenizer=tokens")
    with pytest.raises(ConfigError, match=r"data\.path=.books\.txt"):
        said(*text)
    assert f"submitted: job 101\n  log     tail -F {work}/runs/" in said(*text, f"cluster.work={work}")
    with pytest.raises(ConfigError, match=r"cluster\.work=.nowhere"):
        said(*RUN, "cluster.work=nowhere")


def test_node_local_folders_are_left_to_the_nodes(place: Path) -> None:
    spill = ("memory.spill_folder=/nvme/not/here", "memory.host_gib=64")
    assert "submitted" in said(*RUN, *spill)


@pytest.mark.parametrize("choice", sorted(path.stem for path in (CONF / "cluster").glob("*.yaml")))
def test_every_cluster_gives_a_valid_script(choice: str, place: Path) -> None:
    if choice == "none":
        assert compose_config(["+exp=tiny_cpu", "cluster=none"]).cluster.scheduler == "none"
        return
    device = ["site=cpu", "engine.precision=fp32"] if choice == "slurm_cpu" else ["site.device=cuda"]
    image = ["cluster.image=here.sqsh"] if choice in ("slurm_pyxis", "slurm_apptainer") else []
    assert "bash -n: fine" in said("+exp=tiny_cpu", f"cluster={choice}", *device, *image, "dry=true")


def run_script(text: str, place: Path, **env: str) -> list[str]:
    """What job.sh would be called with: the run folder and the overrides, a line each."""
    project = place / "project"
    (project / "launch" / "slurm").mkdir(parents=True, exist_ok=True)
    body = 'run_job() { echo "$RUN_FOLDER ${SCRATCH:-}"; printf "<%s>\\n" "$@"; printf "[%s]\\n" ${CONTAINER+"${CONTAINER[@]}"}; }\n'
    (project / "launch" / "slurm" / "job.sh").write_text(body)
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "5", **env}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_overrides_arrive_as_they_were_given(place: Path) -> None:
    overrides = ("+exp=qwen3_1m", "name=a b", "engine.overrides={a:1,b:'x'}", 'x=$HOME `id` "q" \\ *')
    cfg = RunConfig(name="x")
    cfg.cluster = ClusterConfig(
        scheduler="slurm",
        container="pyxis",
        image="a b.sqsh",
        scratch="/scratch/$SLURM_JOB_ID",
        environment={"A": 'one $SLURM_JOB_ID "two" `id`'},
        setup=['echo "A=$A"'],
    )
    text = train_script(
        cfg, [Task(place / "runs" / "x", overrides)], place / "runs" / "x", place / "project", place
    )
    lines = run_script(text, place)
    assert lines[0] == 'A=one 5 "two" `id`' and lines[1] == f"{place}/runs/x /scratch/5"
    assert lines[2:6] == [f"<{word}>" for word in overrides]
    assert lines[6] == "[--container-image=a b.sqsh]"
    # what lies in another folder is mounted with it
    assert lines[7] == f"[--container-mounts={place}:{place}]"


def test_array_tasks_pick_their_own_run(place: Path) -> None:
    cfg = RunConfig()
    cfg.cluster.scheduler = "slurm"
    tasks = [Task(place / f"r{number}", (f"seed={number}",)) for number in range(3)]
    text = train_script(cfg, tasks, place / "all", place / "project", place)
    assert "#SBATCH --array=0-2\n" in text
    for number in range(3):
        lines = run_script(text, place, SLURM_ARRAY_TASK_ID=str(number))
        assert lines[:2] == [f"{place}/r{number} ", f"<seed={number}>"]


def test_sweep(place: Path) -> None:
    told = said("-m", *RUN, "optim.lr=1e-5,2e-5", "parallel.sp=4,8", "name=s")
    names = [f"s-lr_{rate}-sp_{sp}" for rate in ("1e-05", "2e-05") for sp in (4, 8)]
    assert f"sweep of 4: {', '.join(names)}" in told
    script = (place / "runs" / "s-sweep" / "job.sbatch").read_text()
    assert script.count(";;") == 4 and "optim.lr=2e-05 parallel.sp=4 name=s name=s-lr_2e-05-sp_4" in script
    assert [record.read_record(place / "runs" / name)[0].job for name in names[:2]] == ["101_0", "101_1"]
    for wrong, match in (
        (("optim.lr=1e-5",), "several values"),
        (("parallel.sp=4,3",), r"parallel.sp=3.*in run"),
        (("cluster.nodes=1,2",), "an array job has one shape"),
        (("optim.lr=interval(1,2)",), "one by one"),
        (("optim.lr=1e-5,2e-5", "cluster.restart=chain"), "a chain would start the whole array again"),
    ):
        with pytest.raises(ConfigError, match=match):
            said("-m", *RUN, *wrong)


def test_sweep_names_are_apart_and_valid() -> None:
    runs = sweep_runs(["optim.lr=1e-3,1e-4", "data.path='a b',c"], "x")
    assert [name for name, _ in runs] == ["x-0", "x-lr_0.001-path_c", "x-2", "x-lr_0.0001-path_c"]
    assert expand_sweep(["a=1"]) == [(["a=1"], {})]
    assert [name for name, _ in sweep_runs(["name=p,q", "seed=1"], "x")] == ["p", "q"]
    named = sweep_runs(["name=p,q", "seed=1,2"], "x")
    assert [name for name, _ in named] == ["p-seed_1", "p-seed_2", "q-seed_1", "q-seed_2"]
    assert named[3][1] == ["name=q", "seed=2", "name=q-seed_2"]


def test_prepare_is_an_array_with_a_merge_behind_it(place: Path) -> None:
    told = said("prepare=4", *RUN)
    folder = place / "runs" / "qwen3_1m"
    assert calls(place)[2:] == [
        f"--parsable {folder}/prepare.sbatch",
        f"--parsable --dependency=afterok:101 --kill-on-invalid-dep=yes {folder}/merge.sbatch",
    ]
    array, merge = (folder / f"{name}.sbatch" for name in ("prepare", "merge"))
    assert "#SBATCH --array=0-3\n" in array.read_text() and "gpus" not in array.read_text()
    assert 'srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --export=ALL python ' in array.read_text()
    assert array.read_text().endswith('"shard=$SLURM_ARRAY_TASK_ID/4"\n')
    assert merge.read_text().endswith(" merge=true\n") and "--array" not in merge.read_text()
    assert "job 101 (4 tasks), and job 102" in told


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["dry=maybe"], "true or false"),
        (["prepare=0"], "a number of array tasks"),
        (["status=nowhere"], "the folder of a run"),
        (["status=.", "+exp=x"], "nothing beside it"),
        (["-m", "prepare=2"], "no sweep beside it"),
    ],
)
def test_wrong_words_of_its_own(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_arguments(arguments)


def write_run(folder: Path, *events: str, step: int = 7) -> None:
    lines = [json.dumps({"event": e, "time": "T", "job": "9", "restart": 0, "checkpoint": 4}) for e in events]
    (folder / "job.jsonl").write_text("\n".join(lines) + "\n" + '{"event": "cut sh')
    (folder / "metrics.jsonl").write_text(
        '{"step": 6}\n' + json.dumps({"step": step, "loss": 2.5, "step_s": 36.0}) + "\n{"
    )
    (folder / "config.yaml").write_text("schedule:\n  steps: 107\n")


def test_status(tmp_path: Path) -> None:
    assert "no job has written" in describe(tmp_path, lambda job: None)
    write_run(tmp_path, "start", "start", "goes on", "start")
    told = describe(tmp_path, lambda job: f"RUNNING on {job}")
    assert "job 9: RUNNING on 9" in told
    assert "step 7 of 107, loss 2.5000, 36 s a step, about 1.0 h to go" in told
    assert "3 start(s) in 1 job(s), 1 of them ended without a word" in told
    assert "not known to Slurm any more; its last word was `start`" in describe(tmp_path, lambda job: None)
    write_run(tmp_path, "start", "done")
    assert "  done, in job 9" in describe(tmp_path, lambda job: "must not be asked")
    write_run(tmp_path, "start", "failed", "gave_up")
    assert "gave up in job 9" in describe(tmp_path, lambda job: None)
    write_run(tmp_path, "start", "stopped")
    (tmp_path / "stopped.json").write_text('{"step": 7, "reason": "SIGTERM"}')
    assert "stopped at step 7 (SIGTERM)" in describe(tmp_path, lambda job: None)
    write_run(tmp_path, "start", "goes on", "start", "preflight failed")
    assert "  preflight failed in job 9" in describe(tmp_path, lambda job: None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:03", 93780),
        ("1-00:00:30", 86430),
        ("0", None),
        ("infinite", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits(text: str, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (dict(time="soon"), "time"),
        (dict(time="10", warn_s=600), "warn_s"),
        (dict(container="pyxis"), "image"),
        (dict(image="x"), "image"),
        (dict(mounts=["/a"]), "mounts"),
        (dict(ranks_per_node=4), "ranks_per_node"),
        (dict(gpu_type="h100", gpu_request="none"), "gpu_type"),
        (dict(environment={"A-B": 1}), "environment.A-B"),
        (dict(extra=["--array=1-3"]), "extra"),
        (dict(extra=["-N4"]), "extra"),
        (dict(extra=["--comment=x --array=0-3"]), "extra"),
        (dict(extra=["mail"]), "extra"),
        (dict(partition="a b"), "partition"),
    ],
)
def test_contradictions_of_a_cluster(changes: dict[str, object], key: str) -> None:
    cluster = ClusterConfig(scheduler="slurm", **changes)  # type: ignore[arg-type]
    assert [fault.key for fault in cluster_faults(cluster)] == [f"cluster.{key}"]
    assert not list(cluster_faults(ClusterConfig(scheduler="slurm", extra=["--mail-type=FAIL"], time="11")))[
        1:
    ]


def test_environment_of_the_ranks(tmp_path: Path) -> None:
    cluster = ClusterConfig(
        network="efa",
        interface="eth1",
        modules=["a/1", "b"],
        environment={"FI_PROVIDER": "own", "A": True, "B": None},
    )
    lines = environment_lines(cluster, tmp_path)
    assert lines[:3] == ["module purge", "module load a/1", "module load b"]
    assert "export A=true" in lines and not any("export B" in line for line in lines)
    assert "export FI_PROVIDER=own" in lines and "export NCCL_SOCKET_IFNAME=eth1" in lines
    assert set(NETWORKS) == {"default", "infiniband", "efa", "ethernet"}
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    assert f"source {tmp_path}/.venv/bin/activate" in environment_lines(ClusterConfig(), tmp_path)
    with pytest.raises(ConfigError, match=r"cluster\.venv"):
        environment_lines(ClusterConfig(venv="other"), tmp_path)
    cluster = ClusterConfig(container="apptainer", image="x.sif", mounts=["/data:/d"])
    (line,) = container_lines(cluster, [tmp_path, REPO_ROOT])
    words = shlex.split(line.removeprefix("INSIDE=(").removesuffix(")"))
    assert words[:3] == ["apptainer", "exec", "--nv"] and words[-3:] == ["--pwd", str(tmp_path), "x.sif"]
    assert f"{REPO_ROOT}:{REPO_ROOT}" in words and "/data:/d" in words
