"""What is refused on the machine itself, before the model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stack.checkpoint.save import Saver
from stack.checkpoint.state import TrainState
from stack.config.compose import compose_config
from stack.errors import ConfigError
from stack.train.folder import RunFolder
from stack.train.run import judge_model, use_cores
from stack.train.saving import make_saver
from tests.unit.train_fakes import one_rank


def test_a_kernel_that_this_machine_lacks_is_refused_at_the_start() -> None:
    """The settings alone cannot tell: with site.device=auto they allow flash kernels."""
    cfg = compose_config(
        ["+exp=tiny_cpu", "site=auto", "engine.precision=bf16", "model.attention=flash_attention_2"]
    )
    with pytest.raises(ConfigError, match=r"model\.attention='flash_attention_2'.*without a GPU"):
        judge_model(cfg, one_rank())


@pytest.mark.parametrize(("pending", "copies"), [({}, 1), ({"step": 4}, 0)])
def test_a_checkpoint_that_will_be_saved_again_is_not_copied_elsewhere_before(
    pending: dict[str, Any], copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy would be of files of both."""
    prepared: list[Saver] = []
    monkeypatch.setattr(Saver, "prepare", lambda saver: prepared.append(saver))
    cfg, state = compose_config(["+exp=tiny_cpu"]), TrainState(step=4, pending_record=pending)
    make_saver(cfg, RunFolder(tmp_path), {}, state, 9, one_rank())
    assert len(prepared) == copies


@pytest.mark.parametrize(
    ("cores", "threads", "asked"), [(96, 1, [12]), (96, 12, []), (96, 96, []), (4, 1, [])]
)
def test_an_optimizer_on_the_host_steps_with_the_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, asked: list[int]
) -> None:
    found: list[int] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("torch.set_num_threads", found.append)
    use_cores(8)
    assert found == asked
