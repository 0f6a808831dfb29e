"""The rank runner itself: values and first causes come back, hangs end with stacks, nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stack.errors import ConfigError, Fault
from tests.ranks import Case, RankFailure, run_cases, run_ranks


def add_ranks(start: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total


def leave_group() -> bool:
    dist.destroy_process_group()
    return dist.is_initialized()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ConfigError([Fault("parallel.sp", 3, "a divisor of 2", "parallel.sp=2")])
    dist.barrier()


def hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()


def die_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_many_cases_in_one_start() -> None:
    outcomes = run_cases(
        2,
        {
            "first": Case(add_ranks, (1,)),
            "own end": Case(leave_group),
            "after it": Case(add_ranks, kwargs={"start": 10}),
            "fails": Case(fail_on_rank_one),
            "after a failure": Case(add_ranks, (100,)),
        },
    )
    assert outcomes["first"].get() == [(0, torch.tensor(3)), (1, torch.tensor(3))]
    assert outcomes["own end"].get() == [False, False]
    assert outcomes["after it"].get() == [(0, torch.tensor(21)), (1, torch.tensor(21))]
    with pytest.raises(ConfigError, match=r"parallel\.sp=3: expected a divisor of 2") as caught:
        outcomes["fails"].get()
    assert "rank 1 of 2 failed first" in caught.value.__notes__[0]
    assert "fail_on_rank_one" in caught.value.__notes__[0]
    assert outcomes["after a failure"].get()[0] == (0, torch.tensor(201))


def test_hang_ends_with_the_stacks_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.GRACE_S", 2.0)
    with pytest.raises(RankFailure) as caught:
        run_ranks(hang_on_rank_one, 2, timeout_s=8)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "hang_on_rank_one" in text and "threading.py" in text and "barrier" in text


def test_killed_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.GRACE_S", 2.0)
    with pytest.raises((RankFailure, RuntimeError)) as caught:
        run_ranks(die_on_rank_zero, 2)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "about to die" in text and "-9" in text


def test_settings_keep_writes_out_of_the_home_folder() -> None:
    for key in ("HOME", "HF_HOME", "TORCH_EXTENSIONS_DIR", "WANDB_DIR"):
        assert "long-sequence-tests-" in os.environ[key]
    assert Path.home() == Path(os.environ["HOME"])
    assert os.environ["HF_HUB_OFFLINE"] == "1"
