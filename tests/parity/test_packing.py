"""Packed documents under sequence parallelism: boundaries inside slices and on their edges, documents longer than a slice,
few targets among many, dealt in every way, and a store of chats, from its files on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stack.config.schema import DataConfig, MethodConfig, RunConfig
from stack.data.loader import Loader
from stack.data.store import TokenStore
from stack.methods.pretrain import Pretrain
from tests.parity import logits_side, reference, steps_side
from tests.parity.cases import ParityCase
from tests.parity.logits_side import Seen
from tests.parity.rank_side import assemble, config_of, weights_of
from tests.parity.reference import Row
from tests.ranks import Case, run_cases
from tests.stores import store_of_ids

# Slices are 12 tokens at SP 2, 6 at SP 4; the row of 23 is padded to 24 at both.
DOCUMENTS = {
    "inside a slice": [10, 14],
    "on the edge of a slice": [12, 12],
    "one token off the edge": [11, 2, 11],
    "longer than a slice": [20, 4],
    "over three slices": [4, 14, 6],
    "first token alone": [1, 23],
    "last token alone": [23, 1],
    "each slice its own": [6, 6, 6, 6],
    "no boundary": [24],
    "padded": [12, 11],
}
LAYOUTS = [
    ParityCase("sp2", 0, 1, "none", False, ""),
    ParityCase("sp2", 3, 1, "all", True, ""),
    ParityCase("sp2", 2, 1, "lean", False, ""),
    ParityCase("sp4", 3, 1, "lean", False, ""),
    ParityCase("sp4", 1, 1, "all", True, ""),
]
READ = [*LAYOUTS, ParityCase("dp2", 3, 1, "all", False, "")]
LRS = [0.1, 0.1, 1024.0]
FEW = [1, 5, 9, 2]
"""Target tokens of four rows: a mean of means would give the single one 17 / 4 times its weight."""

DEALT = {  # layout and rows in a micro-batch, so that accumulation is 4, 1, 4, 1, 2 and 1
    "sp2, accumulation 4": ("sp2", 1),
    "sp2, accumulation 1": ("sp2", 4),
    "dp2, accumulation 2": ("dp2", 1),
    "dp2, accumulation 1": ("dp2", 2),
}

CHAT_LENGTHS = [9, 25, 3, 14, 30, 11, 7, 2, 16, 5, 13, 8, 21, 1, 4]
"""Tokens of chats for rows of 25, which two ranks share as 13 and 12 with a position of padding: 30 is too long, some fill a
row together, one of 25 alone."""

CHAT_LAYOUTS = {"sp2": (3, "all"), "dp2": (3, "all"), "sp2, zero2": (2, "lean")}
"""Layout -> stage and levers. dp2 is each chat whole on one rank, as at SP 1."""


def chats() -> list[tuple[list[int], list[bool]]]:
    """Ids and which of them the assistant says: by turns of three tokens, and in the chat of 14 nothing."""
    rows = [row_of([length], seed).documents[0] for seed, length in enumerate(CHAT_LENGTHS, start=500)]
    return [(ids, [place // 3 % 2 == 1 and len(ids) != 14 for place in range(len(ids))]) for ids in rows]


def learned_chats() -> list[Row]:
    """Those that are short enough and hold a target, for the judge."""
    return [Row([ids], [wanted]) for ids, wanted in chats() if len(ids) <= 25 and any(wanted[1:])]


def train_on_chats(cfg: RunConfig, folder: str, lrs: list[float]) -> tuple[list[steps_side.Step], list[int]]:
    """A step an epoch, through the loader; also the targets of each step, over all ranks."""
    topology = steps_side.topology_of(cfg.parallel.sp)
    engine = assemble(cfg, topology)
    loader = Loader(
        TokenStore(Path(folder)), cfg.data, dp=topology.dp, dp_rank=topology.dp_rank, accumulation=64,
        seed=3, epochs=len(lrs), sp=topology.sp, sp_rank=topology.sp_rank,
    )  # fmt: skip
    seen = [steps_side.Step(0.0, steps_side.StepResult(0.0, False, None, None), weights_of(engine))]
    counts, method = [], Pretrain(MethodConfig())
    for lr in lrs:
        batches = loader.next_step()
        assert batches is not None
        counts.append(int(topology.sum(sum(batch.num_targets for batch in batches))))
        loss = sum(engine.forward_backward(method, batch, counts[-1]).item() for batch in batches)
        result = engine.step(lr)
        seen.append(steps_side.Step(topology.sum(loss) / counts[-1], result, weights_of(engine)))
    assert loader.next_step() is None
    loader.close()
    engine.close()
    return seen, counts


def row_of(lengths: list[int], seed: int) -> Row:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]
    return Row(documents, [[True] * n for n in lengths])


def batches(changed: bool = False) -> list[list[Row]]:
    """The rows of 24 as one micro-batch, the row of 23 as another. changed: the middle token of each first document is
    another one."""
    rows = [row_of(lengths, seed) for seed, lengths in enumerate(DOCUMENTS.values())]
    for row in rows if changed else ():
        first = row.documents[0]
        first[len(first) // 2] = (first[len(first) // 2] + 1) % 64
    return [[row for row in rows if sum(map(len, row.documents)) == length] for length in (24, 23)]


def few_targets(seed: int) -> list[Row]:
    return [
        replace(row_of([15], seed + count), wanted=[[place > 14 - count for place in range(15)]])
        for count in FEW
    ]


STEPS = [batches()[0], batches()[1], batches(changed=True)[0]]
FEW_STEPS = [few_targets(100 * step) for step in range(len(LRS))]


@pytest.fixture(scope="module")
def outcomes(folders, tmp_path_factory):
    """All runs of this file, on one start of two ranks and one of four."""
    found = {}
    ids, targets = zip(*chats(), strict=True)
    store = tmp_path_factory.mktemp("chats") / "store"
    store_of_ids(store, ids, 64, targets)
    chat_data = DataConfig(
        seq_len=25, packing="best_fit", too_long="drop", micro_batch=2, workers=0, eval_fraction=0.0
    )
    for world in (2, 4):
        cases: dict[str, Case] = {}
        for case in (case for case in READ if case.world == world):
            cfg = config_of(case, folders[case.tied])
            cases[f"look {case.name}"] = Case(logits_side.look_at, (cfg, batches() + batches(changed=True)))
            if case in LAYOUTS:
                args = (cfg, STEPS, LRS, None, len(DOCUMENTS))
                cases[f"train {case.name}"] = Case(steps_side.run_steps, args)
        for name, (layout, size) in DEALT.items() if world == 2 else ():
            cfg = config_of(ParityCase(layout, 3, 1, "all", False, ""), folders[False])
            cases[name] = Case(steps_side.run_steps, (cfg, FEW_STEPS, LRS, None, size))
        for name, (stage, levers) in CHAT_LAYOUTS.items() if world == 2 else ():
            cfg = config_of(ParityCase(name[:3], stage, 1, levers, False, ""), folders[False])
            args = (replace(cfg, data=chat_data), str(store), LRS)
            cases[f"chats {name}"] = Case(train_on_chats, args)
        found |= run_cases(world, cases, init=False)
    return found


def documents_of(seen: list[Seen], changed: bool = False) -> list[list[tuple[list[int], Tensor]]]:
    """For each row its documents, each with its logits."""
    found = []
    for rows, part in zip(batches(changed), seen, strict=True):
        for row, logits in zip(rows, part.logits, strict=True):
            pieces = logits.split([len(document) for document in row.documents])
            found.append(list(zip(row.documents, pieces, strict=True)))
    return found


@pytest.mark.parametrize("case", READ, ids=lambda case: case.name)
def test_a_document_is_read_as_if_it_were_alone(case, outcomes, folders):
    seen = outcomes[f"look {case.name}"].get()[0][:2]
    model = reference.load(folders[case.tied])
    total, targets = 0.0, 0
    for row in documents_of(seen):
        for document, logits in row:
            with torch.no_grad():
                alone = model(input_ids=torch.tensor([document]), use_cache=False).logits[0]
            torch.testing.assert_close(logits.double(), alone, rtol=1e-5, atol=1e-5)
            total += F.cross_entropy(
                alone[:-1], torch.tensor(document[1:], dtype=torch.long), reduction="sum"
            ).item()
            targets += len(document) - 1
    assert sum(part.loss for part in seen) == pytest.approx(total, rel=1e-6)
    assert targets == sum(sum(lengths) - len(lengths) for lengths in DOCUMENTS.values())


@pytest.mark.parametrize("case", READ, ids=lambda case: case.name)
def test_a_changed_token_reaches_no_other_document(case, outcomes):
    seen = outcomes[f"look {case.name}"].get()[0]
    before, after = documents_of(seen[:2]), documents_of(seen[2:], changed=True)
    for first, second in zip(before, after, strict=True):
        assert not torch.equal(first[0][1], second[0][1])
        for (_, mine), (_, other) in zip(first[1:], second[1:], strict=True):
            assert torch.equal(mine, other)


def assert_trained_alike(steps: list[steps_side.Step], want: reference.Curve) -> None:
    """Losses and norms of all steps; every gradient of the last, read off its update."""
    got = steps[1:]
    assert [step.loss for step in got] == pytest.approx(want.losses, rel=1e-6)
    assert [step.result.grad_norm for step in got] == pytest.approx(want.norms, rel=1e-5)
    for name, true in want.grads.items():
        grad = (got[-2].weights[name] - got[-1].weights[name]).double() / LRS[-1]
        error = (grad - true).norm() / true.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_trains_as_document_by_document(case, outcomes, folders):
    want = reference.train(reference.load(folders[case.tied]), STEPS, LRS)
    assert_trained_alike(outcomes[f"train {case.name}"].get()[0], want)


@pytest.mark.parametrize("name", DEALT)
def test_each_target_counts_alike_however_rows_are_dealt(name, outcomes, folders):
    want = reference.train(reference.load(folders[False]), FEW_STEPS, LRS)
    assert_trained_alike(outcomes[name].get()[0], want)


@pytest.mark.parametrize("name", CHAT_LAYOUTS)
def test_chats_of_a_store_count_alike_in_slices(name, outcomes, folders):
    steps, counts = outcomes[f"chats {name}"].get()[0]
    learned = learned_chats()
    assert counts == [sum(sum(row.wanted[0][1:]) for row in learned)] * len(LRS)
    want = reference.train(reference.load(folders[False]), [learned] * len(LRS), LRS)
    assert_trained_alike(steps, want)
    whole, whole_counts = outcomes["chats dp2"].get()[0]
    assert counts == whole_counts
    assert [step.loss for step in steps[1:]] == pytest.approx([step.loss for step in whole[1:]], rel=1e-6)
