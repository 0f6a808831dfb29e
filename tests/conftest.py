"""Settings of every test: CPU ranks, no network, nothing written outside the test's own folders."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.fork_ranks import RANK_VARIABLES

# Before torch, deepspeed or transformers is imported, since they read these once.
_HOME = Path(tempfile.mkdtemp(prefix="long-sequence-tests-"))
_OWN_FOLDERS = {
    "HOME": ".",
    "XDG_CACHE_HOME": "cache",
    "HF_HOME": "huggingface",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",  # a lock that a killed run left here would stop every later run
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
    "WANDB_DIR": "wandb",
    "WANDB_CONFIG_DIR": "wandb/config",
    "WANDB_CACHE_DIR": "wandb/cache",
    "WANDB_DATA_DIR": "wandb/data",
}
for _key, _folder in _OWN_FOLDERS.items():
    (_HOME / _folder).mkdir(parents=True, exist_ok=True)
    os.environ[_key] = str(_HOME / _folder)
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
}
if "LONG_SEQUENCE_GPU_TESTS" not in os.environ:  # set by `make gpu-test`
    os.environ["DS_ACCELERATOR"] = "cpu"
for _key in RANK_VARIABLES:
    os.environ.pop(_key, None)


WHOLE_RUNS = ("tests/e2e/", "tests/slurm/", "tests/golden/")


class TwoShares(LoadScopeScheduling):
    """Two shares of about the same length, each in one process in its order: whole runs, which wait for much and have one
    Slurm, and all else."""

    def _split_scope(self, nodeid: str) -> str:
        return "whole runs" if nodeid.startswith(WHOLE_RUNS) else "all else"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoShares:
    return TwoShares(config, log)


def pytest_unconfigure() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)
