"""The benchmark's baseline trains the same as the presets, gradient by gradient: else the comparison would be worthless.

In fp32, on lengths that neither the tiles of the MLP nor those of the loss divide.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stack.bench.settings import contender_configs, read_arguments
from stack.dist.env import read_rank_env
from stack.dist.topology import init_topology
from tests.ranks import Case, run_cases

SEQ, LR = 166, 0.1
NAMES = ("plain", "alst", "lean", "baseline")


@dataclass
class Trained:
    """What one rank saw of two steps; gradients of the first, on rank 0 only."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]


def train(name: str, ranks: int) -> Trained:
    # DeepSpeed reads its device from the environment when it is imported.
    import deepspeed

    from stack.bench.baseline import Baseline
    from stack.bench.contender import Preset, random_rows

    tiles = ("memory.loss_tile=13", "memory.mlp_tile=11")
    changes = ("model=micro", "engine.precision=fp32", "optim=sgd", "optim.clip=0", *tiles)
    settings = read_arguments(["--contenders", name, "--ranks", str(ranks), *changes], num_gpus=0)
    cfg = contender_configs(settings, SEQ)[name]
    topology = init_topology(read_rank_env(dict(os.environ)), cfg.parallel.sp, "cpu", 60)
    contender = Baseline(cfg, topology) if name == "baseline" else Preset(cfg, topology)
    batch, num_targets = random_rows(cfg, contender.built.spec.vocab, topology)

    def weights() -> dict[str, Tensor]:
        found = {}
        for key, parameter in contender.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                found[key] = parameter.detach().clone()
        return found

    def step() -> tuple[float, float]:
        return contender.passes(batch, num_targets), contender.update(LR)

    before = weights()
    steps = [step()]
    after = weights()
    steps.append(step())
    grads = {key: (before[key] - after[key]) / LR for key in before} if topology.is_main else {}
    losses = [topology.sum(loss) / num_targets for loss, _ in steps]
    contender.close()
    return Trained(losses, [norm for _, norm in steps], grads)


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Trained]]:
    # The baseline comes last: it stays registered in its process.
    outcomes = run_cases(2, {name: Case(train, (name, 2)) for name in NAMES})
    return {name: outcome.get() for name, outcome in outcomes.items()}


@pytest.mark.parametrize("name", NAMES[1:])
def test_same_losses_and_norms(trained: dict[str, list[Trained]], name: str) -> None:
    plain = trained["plain"][0]
    for rank in trained[name]:
        assert rank.losses == pytest.approx(plain.losses, rel=1e-5)
        assert rank.norms == pytest.approx(plain.norms, rel=1e-4)


@pytest.mark.parametrize("name", NAMES[1:])
def test_same_gradient_of_every_parameter(trained: dict[str, list[Trained]], name: str) -> None:
    plain, own = trained["plain"][0].grads, trained[name][0].grads
    assert plain.keys() == own.keys()
    for key, grad in plain.items():
        largest = grad.abs().max()
        assert largest > 0, key
        # Read off weights near 1, where fp32 has a step of 1e-7: divided by the learning rate, 1e-6.
        assert (own[key] - grad).abs().max() <= 1e-4 * largest + 3e-6, key


def test_the_rows_are_trained_on(trained: dict[str, list[Trained]]) -> None:
    assert all(rank.losses[1] < rank.losses[0] for ranks in trained.values() for rank in ranks)


def test_possible_tiles_are_what_chunk_makes() -> None:
    from stack.bench.baseline import possible_tiles

    for tokens in range(1, 40):
        for tiles in range(1, 50):
            found = possible_tiles(tokens, tiles)
            assert 1 <= found <= min(tiles, tokens)
            assert len(torch.empty(tokens).chunk(found)) == found
    assert [possible_tiles(10, tiles) for tiles in (4, 6, 10, 20)] == [4, 5, 10, 10]
