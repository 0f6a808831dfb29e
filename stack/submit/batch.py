"""What is asked of Slurm's commands. Each answers within LIMIT_S or is an error."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from stack.errors import LaunchError

LIMIT_S = 60.0  # a controller that is gone is given up by sbatch itself after 18 s


def lint(script: Path) -> str:
    """What the lints found, in words. Raises LaunchError with their own words if one of them refuses the script.

    `bash -n` for the shell, whose faults sbatch does not see; `sbatch --test-only` for what the cluster would refuse, where
    sbatch is there.
    """
    shell = _run(["bash", "-n", str(script)])
    if shell.returncode:
        raise LaunchError(
            f"{script} is no valid shell script: {_words(shell)}. Fix: the lines of cluster.setup and cluster.environment"
        )
    if shutil.which("sbatch") is None:
        return "bash -n: fine; no sbatch on this machine, so the cluster was not asked"
    asked = _run(["sbatch", "--test-only", str(script)])
    if asked.returncode and re.search(
        "configuration source|contact slurm controller", asked.stderr, re.IGNORECASE
    ):
        return f"bash -n: fine; the cluster could not be asked: {_words(asked)}"
    if asked.returncode:
        raise LaunchError(
            f"the cluster would refuse {script}: {_words(asked)}. Fix: the settings of cluster (now in its #SBATCH lines)"
        )
    return f"bash -n: fine; {_words(asked)}"


def submit_script(script: Path, options: Sequence[str] = ()) -> str:
    """The number of the job. Raises LaunchError."""
    if shutil.which("sbatch") is None:
        raise LaunchError(
            f"no sbatch on this machine: {script} is written but not submitted. Fix: run the command on a login node, or "
            "add dry=true to see the script alone"
        )
    try:
        done = _run(["sbatch", "--parsable", *options, str(script)])
    except KeyboardInterrupt:
        raise LaunchError(
            f"interrupted while sbatch was asked: {script} may be queued. Fix: squeue --me, and scancel what is not wanted"
        ) from None
    match = re.match(r"\d+", done.stdout)
    if done.returncode or match is None:
        raise LaunchError(f"sbatch refused {script}: {_words(done)}")
    return match[0]


def state_of(job: str) -> str | None:
    """State and place of a job that waits or runs, as in `RUNNING on node[1-2] for 0:42`; None if it does neither, or
    where Slurm cannot be asked."""
    if shutil.which("squeue") is None:
        return None
    done = _run(["squeue", "--noheader", f"--jobs={job}", "--format=%T|%R|%M"])
    if done.returncode or not done.stdout.strip():  # a job that Slurm has forgotten is an error to squeue
        return None
    state, place, used = done.stdout.strip().splitlines()[0].split("|")
    return f"{state} {place}" if state == "PENDING" else f"{state} on {place} for {used}"


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"no answer from `{' '.join(command)}` within {LIMIT_S:.0f} s. Fix: see whether Slurm's controller is up: scontrol "
            "ping"
        ) from error


def _words(done: subprocess.CompletedProcess[str]) -> str:
    lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    said = [re.sub(r"^(sbatch|bash|squeue): (error: )?", "", line).strip() for line in lines]
    return " ".join(line for line in said if line) or f"exit code {done.returncode}"
