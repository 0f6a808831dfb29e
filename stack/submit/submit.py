"""From a command line to a job, in order: settings checked, forecast asked, script written and linted, submitted, told."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stack.config import derive
from stack.config.checks import check
from stack.config.compose import expand_sweep, from_command_line
from stack.config.derive import REPO_ROOT
from stack.config.schema import RunConfig
from stack.errors import ConfigError, Fault, LaunchError
from stack.plan.verdict import gate
from stack.submit import batch, record
from stack.submit.arguments import EXAMPLE, Request, sweep_runs
from stack.submit.script import Task, prepare_script, train_script

NODE_LOCAL = {"memory.spill_folder", "engine.nvme_path"}
"""Folders on the nodes' own disks, which the login node need not have: each node checks them when the run starts."""
PREPARED = ("data", "model", "cluster")
"""Sections that the preparation of tokens is judged by."""


def submit(request: Request, tell: Callable[[str], None] = print) -> None:
    """What the user asked for. Raises StackError with the cause if it cannot be done."""
    if request.sweep:
        _submit_sweep(request, tell)
        return
    cfg = settings(request.overrides, PREPARED if request.shards else ())
    if cfg is None:  # a question, which is answered
        return
    work, folder = places(cfg, tell)
    if request.shards:
        _submit_prepare(request, cfg, folder, work, tell)
        return
    ask_forecast(cfg, tell)
    text = train_script(cfg, [Task(folder, request.overrides)], folder, REPO_ROOT, work)
    _hand_over(folder, text, [folder], "slurm-{job}.out", request.dry, tell)


def settings(overrides: Sequence[str], only: Sequence[str] = ()) -> RunConfig | None:
    """The settings, checked for the ranks of the job; None for a question. Raises ConfigError with every fault."""
    cfg = from_command_line(overrides, only=only, strict=False)
    if cfg is None:
        return None
    if cfg.cluster.scheduler == "none":
        want = "a cluster to submit to (conf/cluster/*.yaml)"
        raise ConfigError([Fault("cluster", cfg.cluster.name, want, EXAMPLE)])
    os.chdir(work_folder(cfg))  # relative paths are judged as the job will see them
    device = cfg.site.device if cfg.site.device != "auto" else "cuda" if cfg.cluster.gpus_per_node else "cpu"
    faults = [
        fault
        for fault in check(cfg, num_ranks(cfg), device)
        if fault.key not in NODE_LOCAL and (not only or fault.key.split(".")[0] in only)
    ]
    if device == "cpu" and cfg.cluster.gpus_per_node and not only:
        want = "0 with site.device=cpu, whose ranks would leave them idle"
        faults.append(
            Fault("cluster.gpus_per_node", cfg.cluster.gpus_per_node, want, "cluster=slurm_cpu, or site=auto")
        )
    if device == "cuda" and not cfg.cluster.gpus_per_node and not only:
        want = "the GPUs of a node, since site.device=cuda"
        faults.append(Fault("cluster.gpus_per_node", 0, want, "cluster.gpus_per_node=8, or site=cpu"))
    if faults:
        raise ConfigError(faults)
    return cfg


def num_ranks(cfg: RunConfig) -> int:
    """Ranks of the job."""
    return cfg.cluster.nodes * derive.ranks_per_node(cfg.cluster)


def work_folder(cfg: RunConfig) -> Path:
    """The folder that the job runs in. Raises ConfigError if it cannot be that."""
    work = Path(cfg.cluster.work).expanduser() if cfg.cluster.work else Path.cwd()
    if not work.is_absolute() or not work.is_dir():
        want = "a folder that is there, as a path from / on, which the nodes see too"
        raise ConfigError(
            [Fault("cluster.work", cfg.cluster.work, want, "check the path, or cluster.work=null")]
        )
    return work


def places(cfg: RunConfig, tell: Callable[[str], None]) -> tuple[Path, Path]:
    """The folder that the job runs in, and the run folder, both absolute."""
    work = work_folder(cfg)
    tell(
        f"run: {cfg.name}, {cfg.cluster.nodes} node(s) x {derive.ranks_per_node(cfg.cluster)} rank(s), in {work}"
    )
    return work, work / derive.run_folder(cfg).expanduser()


def ask_forecast(cfg: RunConfig, tell: Callable[[str], None]) -> None:
    """What the forecast says of this run. Raises LaunchError where it cannot fit and `plan.gate` refuses that."""
    if cfg.plan.gate == "off":
        return
    try:
        found = gate(cfg, num_ranks(cfg), cfg.plan.calibration)
    except ConfigError as error:
        tell(f"forecast: none for this model ({error.faults[0]})")
        return
    of_card = f" of {found.card_bytes / 2**30:.1f}" if found.card_bytes else ""
    need = f"{found.need_bytes / 2**30:.1f}{of_card} GiB a GPU with the margin"
    reasons = "".join(f"\n  - {reason}" for reason in found.reasons)
    if found.refuses(cfg.plan.gate):
        raise LaunchError(
            f"the forecast says that {cfg.name} {found.answer}: {need}{reasons}\nFix: `python launch/plan.py` with the same "
            "settings lists what would help; plan.gate=warn submits all the same"
        )
    seconds = found.forecast.time.seconds
    tell(f"forecast: {found.answer}, {need}{f', about {seconds:.3g} s a step' if seconds else ''}{reasons}")


def _hand_over(
    folder: Path, text: str, runs: Sequence[Path], log: str, dry: bool, tell: Callable[[str], None]
) -> None:
    """Write the script, lint it, submit it and tell of it. log: name of its log, with {job} for the number."""
    for run in runs:
        _refuse_second(run)
    script = write_script(folder / "job.sbatch", text)
    tell(f"script: {script}\n  {batch.lint(script)}")
    if dry:
        tell(f"dry=true: not submitted. By hand: sbatch {shlex.quote(str(script))}")
        return
    job = batch.submit_script(script)
    for index, run in enumerate(runs):
        own = f"{job}_{index}" if len(runs) > 1 else job
        run.mkdir(parents=True, exist_ok=True)
        record.append(run, "submitted", own, time.strftime("%Y-%m-%dT%H:%M:%S%z"), host=os.uname().nodename)
    place, each = shlex.quote(str(runs[0])), " (so for each run)" if len(runs) > 1 else ""
    tell(
        f"submitted: job {job}\n"
        f"  log     tail -F {shlex.quote(str(folder / log.format(job=job)))}\n"
        f"  status  python launch/submit.py status={place}{each}; squeue --jobs={job}\n"
        f"  stop    scancel {job} (saves and ends); scancel --batch --signal=USR1 {job} (saves and goes on later)"
    )


def _refuse_second(run: Path) -> None:
    """One job at a time in a run folder: the second would only fail once it has its nodes."""
    for job in record.unfinished_jobs(record.read_record(run)):
        if (state := batch.state_of(job)) is not None:
            raise LaunchError(
                f"{run} belongs to job {job} ({state}). Fix: wait for it, scancel {job}, or give this run another name: "
                "name=NEW_NAME"
            )


def write_script(path: Path, text: str) -> Path:
    """The file, complete or as it was. Raises LaunchError."""
    part = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.chmod(0o755)
        part.replace(path)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be written: {error}. Fix: set `out` to a folder you can write"
        ) from error
    return path


def _submit_sweep(request: Request, tell: Callable[[str], None]) -> None:
    """An array job with a run folder a task. Every run is checked before any is submitted."""
    swept = {text for text in request.overrides if text not in expand_sweep(request.overrides)[0][0]}
    base = from_command_line([text for text in request.overrides if text not in swept], strict=False)
    if base is None:
        return
    runs, faults = [], []
    for name, overrides in sweep_runs(request.overrides, base.name):
        try:
            cfg = settings(overrides)
        except ConfigError as error:
            faults += [replace(fault, want=f"{fault.want} (in run {name})") for fault in error.faults]
        else:
            assert cfg is not None
            runs.append((cfg, tuple(overrides)))
    if any(cfg.cluster != runs[0][0].cluster for cfg, _ in runs):
        faults.append(
            Fault("cluster", "a sweep", "one cluster for all: an array job has one shape", "-m for others")
        )
    if not faults and runs[0][0].cluster.restart == "chain":
        want = "requeue or none for a sweep: a chain would start the whole array again"
        faults.append(Fault("cluster.restart", "chain", want, "cluster.restart=requeue"))
    if faults:
        raise ConfigError(faults)
    first = replace(runs[0][0], name=f"{base.name}-sweep")
    work, shared = places(first, tell)
    for cfg, _ in runs:
        ask_forecast(cfg, tell)
    tasks = [Task(work / derive.run_folder(cfg).expanduser(), overrides) for cfg, overrides in runs]
    tell(f"sweep of {len(tasks)}: {', '.join(task.folder.name for task in tasks)}")
    text = train_script(first, tasks, shared, REPO_ROOT, work)
    _hand_over(shared, text, [task.folder for task in tasks], "slurm-{job}_0.out", request.dry, tell)


def _submit_prepare(
    request: Request, cfg: RunConfig, folder: Path, work: Path, tell: Callable[[str], None]
) -> None:
    """An array job over the shards of the tokens, and a merge that waits for all of it to succeed."""
    common = (cfg, request.overrides, folder, REPO_ROOT, work, request.shards)
    array = write_script(folder / "prepare.sbatch", prepare_script(*common))
    merge = write_script(folder / "merge.sbatch", prepare_script(*common, merge=True))
    for script in (array, merge):
        tell(f"script: {script}\n  {batch.lint(script)}")
    if request.dry:
        tell(
            f"dry=true: not submitted. By hand: sbatch {shlex.quote(str(array))}, and behind it\n"
            f"  sbatch --dependency=afterok:JOB --kill-on-invalid-dep=yes {shlex.quote(str(merge))}"
        )
        return
    job = batch.submit_script(array)
    # Without the second option a merge behind a failed array would wait for ever.
    last = batch.submit_script(merge, [f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes"])
    tell(
        f"submitted: job {job} ({request.shards} tasks), and job {last} that merges what they made\n"
        f"  log     {folder}/prepare-{job}_*.out, {folder}/merge-{last}.out\n"
        f"  status  squeue --jobs={job},{last}\n"
        f'  train   python launch/submit.py ... \'cluster.extra=["--dependency=afterok:{last}",'
        '"--kill-on-invalid-dep=yes"]\''
    )
