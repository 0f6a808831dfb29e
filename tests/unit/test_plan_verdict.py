"""Whether a run fits: the four answers, and what a launch does with them."""

from __future__ import annotations

import pytest

from stack.plan.closed_form import plan
from stack.plan.forecast import GIB
from stack.plan.machine import read_machine
from stack.plan.verdict import EXIT_CODES, FITS, NO, TIGHT, UNPROVEN, gate, need_of, verdict
from tests.unit.plan_rig import configured

SMALL = ("+exp=qwen3_1m", "model.architecture.num_hidden_layers=4")


def _with_card(gib: float, *overrides: str, world: int = 8):
    cfg = configured(*SMALL, f"site.memory_gib={gib}", *overrides)
    machine = read_machine(cfg.site)
    return verdict(plan(cfg, world, machine), machine)


def test_the_margin_decides_between_fits_tight_and_does_not_fit() -> None:
    cfg = configured(*SMALL)
    machine = read_machine(cfg.site)
    found = plan(cfg, 8, machine)
    need = need_of(found, machine)
    assert need == pytest.approx(
        1.12 * found.memory.peak.num_bytes + found.memory.communication_bytes + 4 * GIB, rel=1e-6
    )
    assert found.memory.communication_bytes == pytest.approx((0.5 + 7 * 0.44) * GIB, rel=1e-6)
    answers = [_with_card(need / GIB * factor).answer for factor in (1.2, 1.05, 0.99)]
    assert answers == [FITS, TIGHT, NO]
    assert f"{need / GIB:.1f} GiB" in _with_card(need / GIB * 0.99).reasons[0]


def test_host_memory_decides_too() -> None:
    fits = gate(configured(*SMALL), 8)
    assert fits.answer == FITS and fits.reasons == []
    node = fits.forecast.host.node_bytes / GIB
    assert gate(configured(*SMALL, f"site.host_memory_gib={node * 0.9}"), 8).answer == NO
    tight = gate(configured(*SMALL, f"site.host_memory_gib={node * 1.1}"), 8)
    assert tight.answer == TIGHT and "host memory" in tight.reasons[0]


@pytest.mark.parametrize(
    ("overrides", "world", "reason"),
    [
        (("parallel.sp=32",), 32, "parallel.sp=32"),
        ((), 32, "4 nodes"),
        (("model=qwen3_32b", "memory=alst", "site=b200x8"), 8, "33 billion"),
        (("site=auto",), 8, "site=auto has no memory_gib"),
    ],
)
def test_beyond_what_was_compared_with_runs_it_is_unproven(
    overrides: tuple[str, ...], world: int, reason: str
) -> None:
    cfg = configured("+exp=qwen3_1m", *overrides)
    machine = read_machine(cfg.site)
    found = verdict(plan(cfg, world, machine), machine)
    assert found.answer == UNPROVEN and any(reason in text for text in found.reasons), found.reasons


def test_too_few_gpus() -> None:
    assert "on 1 node(s)" in gate(configured(*SMALL, "site.nodes=1"), 16).reasons[0]


def test_only_what_cannot_fit_is_refused_and_only_if_asked() -> None:
    no = _with_card(5)
    assert no.refuses("refuse") and not no.refuses("warn") and not no.refuses("off")
    assert not _with_card(1000).refuses("refuse")
    assert sorted(EXIT_CODES.values()) == [0, 3, 4, 5] and no.exit_code == 4


def test_a_cpu_needs_no_cuda() -> None:
    found = gate(configured("+exp=tiny_cpu", "site=cpu", "site.memory_gib=4", "site.host_memory_gib=16"), 1)
    assert found.answer == FITS
    memory = found.forecast.memory
    assert memory.overhead_bytes == memory.communication_bytes == 0
