"""The command line of the benchmark, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from stack.bench.settings import BenchSettings, contender_configs, read_arguments
from stack.errors import ConfigError


def settings(*arguments: str) -> BenchSettings:
    return read_arguments(arguments, num_gpus=0)


def test_defaults_are_the_case_of_the_readme() -> None:
    given = settings()
    assert given.contenders == ("baseline", "checkpoint", "alst", "lean")
    assert given.lengths == (4096, 16384, 32768)
    assert (given.ranks, given.device, given.threads) == (2, "cpu", 1)
    cfg = contender_configs(given, 4096)["lean"]
    assert (cfg.parallel.sp, cfg.engine.stage, cfg.engine.precision) == (2, 3, "bf16")
    architecture = cfg.model.architecture
    assert (architecture["hidden_size"], architecture["num_hidden_layers"]) == (256, 4)
    assert (architecture["num_attention_heads"], architecture["num_key_value_heads"]) == (8, 4)


def test_one_rank_for_each_gpu() -> None:
    given = read_arguments([], num_gpus=8)
    assert (given.ranks, given.device) == (8, "cuda")
    assert read_arguments(["--device", "cpu"], num_gpus=8).ranks == 2


def test_contenders_differ_in_memory_alone() -> None:
    given = settings(
        "--contenders", "baseline,plain,alst", "--lengths", "64,32", "memory.loss_tile=8", "model=micro"
    )
    assert given.lengths == (32, 64)
    configs = contender_configs(given, 64)
    assert list(configs) == ["baseline", "plain", "alst"]
    assert configs["alst"].memory.checkpointing == "full"
    assert {cfg.memory.loss_tile for cfg in configs.values()} == {8}
    assert len({repr(replace(cfg, memory=configs["plain"].memory)) for cfg in configs.values()}) == 1


@pytest.mark.parametrize(
    "arguments, message",
    {
        "unknown preset": (("--contenders", "baseline,leen"), r"memory='leen'.*lean"),
        "no number": (("--lengths", "4k"), r"--lengths='4k'"),
        "uneven": (("--lengths", "63"), r"--lengths=\[63\].*parallel.sp=2"),
        "preset as a setting": (("memory=alst",), r"memory='memory=alst'.*--contenders"),
        "length as a setting": (("data.seq_len=64",), r"data.seq_len.*--lengths"),
        "no steps": (("--steps", "0"), r"--steps=0"),
        "tied": (("model=tiny",), r"tie_word_embeddings=True.*leave out the baseline"),
        "other stage": (("engine=zero2",), r"engine.stage=2"),
        "more rows": (("data.micro_batch=2",), r"data.micro_batch=2"),
        "accumulation": (("engine.accumulation=2",), r"engine.accumulation=2"),
        "typo": (("optim.lrr=1",), r"optim.lrr.*optim.lr"),
    }.values(),
)
def test_faults_name_what_to_change(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        contender_configs(given := settings(*arguments), given.lengths[0])
    assert re.search(message, str(raised.value))
