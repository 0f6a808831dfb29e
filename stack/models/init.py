"""Weights from scratch, one module at a time, by the model's own rule.

Each module draws from a random state of its own, derived from the run's seed and the module's name, in fp32. So the
values depend neither on the ZeRO stage nor on the number of ranks or the order of modules, and no rank needs more than
one module at a time.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers import PreTrainedModel

from stack.errors import ModelError


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that `module` holds itself, without those of its children."""
    return {name: value for name, value in module._parameters.items() if value is not None}


def module_seed(seed: int, name: str) -> int:
    """Seed of the module called `name`, 63 bits."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def owner_of(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost PreTrainedModel around the module called `name`: its `_init_weights` is the rule that counts."""
    owner: nn.Module = model
    current: nn.Module = model
    for part in name.split(".") if name else []:
        current = current.get_submodule(part)
        owner = current if isinstance(current, PreTrainedModel) else owner
    assert isinstance(owner, PreTrainedModel)
    return owner


def draw(model: PreTrainedModel, module: nn.Module, name: str, seed: int) -> dict[str, torch.Tensor]:
    """Initial values of the module's own parameters, fp32 on the CPU, by the model's own rule.

    The module's parameters and torch's random state are left as they were.
    """
    before = dict(module._parameters)
    try:
        for key, parameter in own_parameters(module).items():
            module._parameters[key] = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(module_seed(seed, name))
            owner_of(model, name)._init_weights(module)
        return {key: parameter.data for key, parameter in own_parameters(module).items()}
    finally:
        module._parameters.update(before)


def check_rule(model: PreTrainedModel) -> None:
    """Raise ModelError unless the model's rule sets every parameter, and each from its own module.

    Tried on the meta device: a parameter's version counter tells whether the rule wrote to it. A parameter that only
    the constructor sets would be left undefined, and one that a parent sets would be drawn before its parent is reached.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    faults: list[str] = []
    for name, module in model.named_modules():
        own = {id(parameter) for parameter in own_parameters(module).values()}
        before = {id(parameter): parameter._version for parameter in module.parameters()}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            owner_of(model, name)._init_weights(module)
        for parameter in module.parameters():
            written = parameter._version != before[id(parameter)]
            if id(parameter) in own and not written:
                faults.append(f"{names[id(parameter)]} is not set")
            elif id(parameter) not in own and written:
                faults.append(
                    f"{names[id(parameter)]} is set by {name or type(model).__name__}, not by its own module"
                )
    if faults:
        raise ModelError(
            f"{type(model).__name__} cannot be initialised module by module: {'; '.join(faults[:5])}"
            f"{f' and {len(faults) - 5} more' if len(faults) > 5 else ''}. Fix: model.init=pretrained"
        )
