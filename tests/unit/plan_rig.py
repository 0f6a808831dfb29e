"""What tests of the forecast share."""

from __future__ import annotations

from stack.config.compose import compose_config
from stack.config.schema import RunConfig
from stack.plan.levers import Run
from stack.plan.machine import read_machine


def configured(*overrides: str) -> RunConfig:
    """A configuration that need not be able to run here."""
    return compose_config(["site=h100x8", *overrides], strict=False)


def planned(*overrides: str, world: int) -> Run:
    cfg = configured(*overrides)
    return Run(cfg, world, read_machine(cfg.site))
