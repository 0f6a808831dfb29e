"""From made-up measurements to the numbers of the report."""

from __future__ import annotations

import pytest

from stack.bench.measured import CallCount, Inspection, Measured, Probe
from stack.bench.report import draw, tables
from stack.bench.summary import Row, growth_of, rows_of
from stack.models.spec import ModelSpec

SPEC = ModelSpec(
    family="qwen3",
    num_layers=2,
    hidden=8,
    intermediate=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab=32,
    tied=False,
    windows=(None, None),
    attention_weights=2 * 200,
    mlp_weights=2 * 384,
)
SP, RANKS = 2, 2


def measured(name: str, tokens: int, seconds: list[float], peak: int, forwards: int) -> Measured:
    """Attention takes 0.1 s forward and 0.2 s backward, a product of 1000 FLOPs 1 ms, on both ranks alike."""
    attention = 4.0 * 2 * 2 * tokens**2 / 2
    calls = [
        CallCount("mm", "gemm", 1000.0, 50),
        CallCount("sdpa", "attention_forward", attention, forwards),
        CallCount("sdpa_backward", "attention_backward", 2.5 * attention, 2),
    ]
    probe = Probe(1e6, 0.1, 0.2, [0.001, 0.1, 0.2])
    traffic = {"all-gather": {"calls": 3, "num_bytes": 2**20, "seconds": 0.5}}
    ranks = [Inspection(4 * peak, peak + 500, peak - 10 * rank, 100, 50, traffic) for rank in range(RANKS)]
    return Measured(name, tokens, ranks, [calls, calls], 2.0, 1.0, seconds, [[probe, probe] for _ in seconds])


@pytest.fixture
def rows() -> list[Row]:
    found = []
    for tokens in (64, 128):
        found += [
            measured("baseline", tokens, [2.0, 4.0, 2.0], 1000 + 20 * tokens, forwards=4),
            measured("lean", tokens, [1.0, 3.0, 1.6], 1100 + 8 * tokens, forwards=2),
        ]
    return rows_of(found, SPEC, SP, rows=1)


def test_times_and_ratios_of_the_turns(rows: list[Row]) -> None:
    baseline, lean = rows[:2]
    assert (lean.step_s.median, lean.step_s.least, lean.step_s.most) == (1.6, 1.0, 3.0)
    # Turn by turn: 0.5, 0.75, 0.8; the ratio of the medians would be 0.8.
    assert lean.ratio is not None and baseline.ratio is not None
    assert (lean.ratio.median, lean.ratio.least, lean.ratio.most) == (0.75, 0.5, 0.8)
    assert baseline.ratio.median == 1.0
    assert lean.tokens_per_s == 64 / 1.6


def test_utilisation_at_the_machines_own_rates(rows: list[Row]) -> None:
    baseline, lean = rows[:2]
    needed_gemm_s = 3 * 2 * 64 * (2 * 200 + 2 * 384 + 32 * 8) / RANKS / 1e6
    assert lean.mfu == pytest.approx((needed_gemm_s + 2 * (0.1 + 0.2)) / 1.6)
    assert lean.hfu == pytest.approx((50 * 1000 / 1e6 + 2 * 0.1 + 2 * 0.2) / 1.6)
    assert baseline.hfu == pytest.approx((50 * 1000 / 1e6 + 4 * 0.1 + 2 * 0.2) / 2.0)
    assert lean.products_s == pytest.approx(50 * 0.001 + 2 * 0.1 + 2 * 0.2)
    assert lean.over_products == pytest.approx(1.6 / lean.products_s)


def test_bytes_are_of_the_fullest_rank_and_grow_as_made(rows: list[Row]) -> None:
    assert rows[1].passes_peak_bytes == 1100 + 8 * 64
    assert rows[1].peak_bytes == 1600 + 8 * 64
    baseline, lean = growth_of(rows)
    assert (lean.fixed_bytes, lean.bytes_a_token) == pytest.approx((1100, 8))
    assert lean.bytes_ratio == pytest.approx(8 / 20)
    assert baseline.bytes_ratio == 1.0


def test_without_a_baseline_there_are_no_ratios() -> None:
    alone = rows_of([measured("lean", 64, [1.0], 1000, 2)], SPEC, SP, rows=1)
    assert alone[0].ratio is None
    assert growth_of(alone) == []
    assert "over baseline" not in tables(alone, [])


def test_report_shows_the_headline_and_draws(rows: list[Row], tmp_path) -> None:
    fits = growth_of(rows)
    text = tables(rows, fits)
    assert "lean over baseline: step 0.750 at 64, 0.750 at 128; peak bytes a token 0.400" in text
    assert "all-gather" in text
    draw(rows, fits, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
