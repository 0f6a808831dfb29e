"""What is learned from a batch, one method a file.

To add one: write `methods/NAME.py` with a class that follows `base.Method` and takes a `MethodConfig`; add it
to METHODS below, its name to `MethodConfig.name`, and a `conf/method/NAME.yaml`.
`tests/contract/test_method_contract.py` runs over every entry of METHODS.
"""

from __future__ import annotations

from collections.abc import Callable

from stack.config.schema import MethodConfig
from stack.methods.base import Method
from stack.methods.pretrain import Pretrain

METHODS: dict[str, Callable[[MethodConfig], Method]] = {
    "pretrain": Pretrain,
}


def build_method(config: MethodConfig) -> Method:
    """The method that `method.name` names."""
    return METHODS[config.name](config)


__all__ = ["METHODS", "Method", "build_method"]
