"""What is refused on the machine itself, before the model is built."""

from __future__ import annotations

import pytest

from stack.config.compose import compose_config
from stack.errors import ConfigError
from stack.train.run import judge_model
from tests.unit.train_fakes import one_rank


def test_a_kernel_that_this_machine_lacks_is_refused_at_the_start() -> None:
    """The settings alone cannot tell: with site.device=auto they allow flash kernels."""
    cfg = compose_config(
        ["+exp=tiny_cpu", "site=auto", "engine.precision=bf16", "model.attention=flash_attention_2"]
    )
    with pytest.raises(ConfigError, match=r"model\.attention='flash_attention_2'.*without a GPU"):
        judge_model(cfg, one_rank())
