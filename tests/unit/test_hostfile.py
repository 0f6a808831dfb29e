"""A hostfile that is not there is an error, not a run on one machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from stack.dist.env import RankEnv
from stack.dist.launcher import _hostfile, check_hostfile
from stack.errors import LaunchError

ENV = RankEnv(0, 2, 0, 2, "a", 29500, "deepspeed")


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("python deepspeed --hostfile hosts launch/train.py +exp=x", "hosts"),
        ("python deepspeed --num_gpus 2 --hostfile=/a/hosts launch/train.py", "/a/hosts"),
        ("python deepspeed -H hosts --no_ssh launch/train.py", "hosts"),
        ("python deepspeed launch/train.py --hostfile x", None),
        ("python deepspeed --num_gpus 2 launch/train.py", None),
    ],
)
def test_hostfile_of_a_command(command: str, file: str | None) -> None:
    assert _hostfile(command.split()) == file


def test_missing_hostfile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Launcher:
        def cmdline(self) -> list[str]:
            return ["python", "deepspeed", "--hostfile", "hosts", "launch/train.py"]

        def cwd(self) -> str:
            return str(tmp_path)

    monkeypatch.setattr(psutil.Process, "parents", lambda self: [None, Launcher()])
    with pytest.raises(LaunchError, match=f"--hostfile hosts: there is no such file, seen from {tmp_path}"):
        check_hostfile(ENV)
    check_hostfile(replace(ENV, launcher="torchrun"))
    (tmp_path / "hosts").write_text("a slots=2\n")
    check_hostfile(ENV)
