"""The range of each single setting, as one table; what several settings mean together is in `checks.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from stack.config.schema import RunConfig
from stack.errors import Fault


@dataclass(frozen=True)
class Range:
    """holds: the test of a value; want: the range in words."""

    holds: Callable[[Any], bool]
    want: str


POSITIVE = Range(lambda value: value > 0, "a number above 0")
NOT_NEGATIVE = Range(lambda value: value >= 0, "0 or more")
SHARE = Range(lambda value: 0 <= value <= 1, "a number from 0 to 1")
REACHED = Range(lambda value: 0 < value <= 1, "a number above 0, up to 1")
BELOW_ONE = Range(lambda value: 0 <= value < 1, "a number from 0 to below 1")
HALF = Range(lambda value: 0 <= value <= 0.5, "a number from 0 to 0.5")
NOT_EMPTY = Range(lambda value: bool(value.strip()), "text that is not empty")
SEED = Range(lambda value: 0 <= value < 2**63, "a whole number from 0 to 2^63 - 1")
FROM_ONE = Range(lambda value: value >= 1, "a number of at least 1")
TWO_TOKENS = Range(lambda value: value >= 2, "at least 2 tokens, one to read and one to predict")
BETAS = Range(
    lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers from 0 to below 1"
)
FOLDER_NAME = Range(
    lambda value: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,127}", value) is not None,
    "a folder name: letters, digits and . _ + = -, the first a letter or digit, at most 128",
)

RANGES: dict[str, tuple[Range, object]] = {
    "name": (FOLDER_NAME, "run1"),
    "out": (NOT_EMPTY, "runs"),
    "seed": (SEED, 1234),
    "model.rope.factor": (FROM_ONE, 4),
    "model.rope.original_length": (POSITIVE, 32768),
    "model.rope.theta": (Range(lambda value: value > 1, "a number above 1"), 1000000),
    "data.store": (NOT_EMPTY, "data"),
    "data.text_field": (NOT_EMPTY, "text"),
    "data.messages_field": (NOT_EMPTY, "messages"),
    "data.tools_field": (NOT_EMPTY, "tools"),
    "data.random_tokens": (POSITIVE, 1048576),
    "data.random_document_tokens": (POSITIVE, 4096),
    "data.seq_len": (TWO_TOKENS, 4096),
    "data.token_eos": (NOT_NEGATIVE, 0),
    "data.prepare_workers": (NOT_NEGATIVE, 4),
    "data.split": (NOT_EMPTY, "train"),
    "data.micro_batch": (POSITIVE, 1),
    "data.workers": (NOT_NEGATIVE, 1),
    "data.prefetch": (POSITIVE, 2),
    "data.eval_fraction": (HALF, 0.02),
    "method.label_smoothing": (BELOW_ONE, 0.1),
    "method.z_loss": (NOT_NEGATIVE, 0.0001),
    "parallel.sp": (POSITIVE, 1),
    "memory.attention_heads": (NOT_NEGATIVE, 0),
    "memory.host_gib": (POSITIVE, 64),
    "memory.loss_tile": (POSITIVE, 4096),
    "memory.mlp_tile": (POSITIVE, 32768),
    "engine.accumulation": (POSITIVE, 1),
    "engine.max_nonfinite_steps": (NOT_NEGATIVE, 3),
    "engine.timeout_s": (POSITIVE, 1800),
    "optim.lr": (POSITIVE, 1e-5),
    "optim.betas": (BETAS, "[0.9,0.95]"),
    "optim.eps": (POSITIVE, 1e-8),
    "optim.weight_decay": (NOT_NEGATIVE, 0.1),
    "optim.clip": (NOT_NEGATIVE, 1.0),
    "schedule.steps": (POSITIVE, 1000),
    "schedule.epochs": (POSITIVE, 1),
    "schedule.warmup_steps": (NOT_NEGATIVE, 0),
    "schedule.decay_steps": (POSITIVE, 100),
    "schedule.min_lr_ratio": (SHARE, 0.1),
    "checkpoint.every": (NOT_NEGATIVE, 0),
    "checkpoint.keep": (NOT_NEGATIVE, 2),
    "checkpoint.keep_every": (NOT_NEGATIVE, 1000),
    "checkpoint.keep_best": (NOT_NEGATIVE, 1),
    "checkpoint.max_failures": (NOT_NEGATIVE, 3),
    "checkpoint.resume": (NOT_EMPTY, "auto"),
    "faults.watchdog_s": (NOT_NEGATIVE, 900),
    "faults.spike_factor": (
        Range(lambda value: value == 0 or value > 1, "0, or a number above 1"),
        3,
    ),
    "faults.spike_min_steps": (
        Range(lambda value: 1 <= value <= 64, "a number from 1 to 64, the losses that are kept"),
        16,
    ),
    "faults.max_rollbacks": (NOT_NEGATIVE, 3),
    "log.every": (POSITIVE, 1),
    "log.eval_every": (NOT_NEGATIVE, 0),
    "log.eval_rows": (NOT_NEGATIVE, 16),
    "site.peak_tflops": (POSITIVE, 989),
    "site.memory_gib": (POSITIVE, 79.1),
    "site.memory_tb_s": (POSITIVE, 3.35),
    "site.gpus_a_node": (POSITIVE, 8),
    "site.nodes": (POSITIVE, 4),
    "site.host_memory_gib": (POSITIVE, 2000),
    "site.host_memory_gb_s": (POSITIVE, 400),
    "site.link_gb_s": (POSITIVE, 360),
    "site.network_gb_s": (POSITIVE, 45),
    "site.host_link_gb_s": (POSITIVE, 50),
    "site.disk_gb_s": (POSITIVE, 20),
    "site.gemm_share": (REACHED, 0.62),
    "site.attention_share": (REACHED, 0.325),
    "site.attention3_share": (REACHED, 0.55),
    "site.memory_share": (REACHED, 0.75),
    "site.context_gib": (NOT_NEGATIVE, 0.6),
    "site.communicator_gib": (NOT_NEGATIVE, 0.5),
    "site.exchange_gib": (NOT_NEGATIVE, 0.44),
    "site.reserve_share": (NOT_NEGATIVE, 0.03),
    "cluster.nodes": (POSITIVE, 4),
    "cluster.gpus_per_node": (NOT_NEGATIVE, 8),
    "cluster.ranks_per_node": (POSITIVE, 8),
    "cluster.cpus_per_node": (POSITIVE, 64),
    "cluster.memory_gib": (POSITIVE, 500),
    "cluster.warn_s": (POSITIVE, 600),
    "cluster.max_failures": (POSITIVE, 2),
    "cluster.preflight_s": (Range(lambda value: value >= 10, "a number of at least 10 s"), 120),
}
"""Setting -> its range, and an example that lies inside. A setting that is None is derived, and not
tested."""


def range_faults(cfg: RunConfig) -> Iterator[Fault]:
    """A fault for each setting outside its range."""
    for key, (allowed, example) in RANGES.items():
        value = attrgetter(key)(cfg)
        if value is not None and not allowed.holds(value):
            yield Fault(key, value, allowed.want, f"e.g. {key}={example}")
