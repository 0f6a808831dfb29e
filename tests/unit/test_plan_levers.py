"""Levers are settings that can be pasted, each saves what planning again says, and searches end at the edge."""

from __future__ import annotations

from pathlib import Path

import pytest

from stack.config.compose import compose_config
from stack.errors import ConfigError
from stack.plan.changes import as_overrides, changed, preset
from stack.plan.levers import levers_of, room_left, stack_levers, try_levers
from stack.plan.search import MOST_GPUS, MOST_TOKENS, fewest_gpus, longest, sweep_lengths, what_ends
from stack.plan.verdict import FITS, NO
from tests.unit.plan_rig import configured, planned

FEW = ("+exp=qwen3_1m", "model.architecture.num_hidden_layers=3")


@pytest.mark.parametrize(
    "overrides", [("memory=plain", "engine=zero2", "data.micro_batch=2"), ("memory=alst",), ("memory=lean",)]
)
def test_a_lever_says_what_the_command_line_takes(overrides: tuple[str, ...]) -> None:
    run = planned(*FEW, *overrides, world=8)
    levers = list(levers_of(run))
    assert len(levers) >= 5
    for changes in levers:
        text = [word for word in as_overrides(changes).split() if not word.startswith("gpus=")]
        asked = changed(run.cfg, tuple(pair for pair in changes if pair[0] != "gpus"))
        typed = compose_config(["site=h100x8", *FEW, *overrides, *text], strict=False)
        assert asked == typed, changes


@pytest.mark.parametrize(
    "overrides",
    [("memory=lean",), ("memory=lean", "memory.attention_heads=3"), ("+exp=tiny_cpu",), ("+exp=quickstart",)],
)
@pytest.mark.parametrize("name", ["alst", "lean", "plain"])
def test_a_preset_is_what_pasting_it_makes(overrides: tuple[str, ...], name: str) -> None:
    """Settings of the experiment and of the command line stay over it."""
    cfg = changed(configured(*overrides), (("memory", name),))
    assert cfg == configured(*overrides, f"memory={name}")
    assert dict(preset("memory", "lean"))["lean"] is True


def test_what_is_stacked_can_be_pasted() -> None:
    """In any order of presets and settings of theirs."""
    changes = (("memory.tiled_loss", True), ("memory.loss_tile", 512), ("memory", "lean"))
    overrides = (*FEW, "memory=plain")
    typed = configured(*overrides, *as_overrides(changes).split())
    assert changed(configured(*overrides), changes) == typed and typed.memory.loss_tile == 512


def test_what_a_start_would_refuse_is_no_lever() -> None:
    run = planned(*FEW, "data.seq_len=8", "model=llama3_8b", world=8)
    with pytest.raises(ConfigError, match=r"data\.seq_len"):
        run.plan((("gpus", 16), ("parallel.sp", 16)))
    assert not any("parallel.sp" in lever.overrides for lever in try_levers(run, run.plan()))


def test_more_rows_where_the_heads_allow_no_larger_group() -> None:
    run = planned("+exp=qwen3_1m", "memory=plain", "parallel.sp=32", world=32)
    found = {lever.overrides for lever in try_levers(run, run.plan())}
    assert "gpus=64" in found and not any("parallel.sp" in text for text in found)


def test_a_card_that_is_not_known_asks_for_no_stack() -> None:
    run = planned(*FEW, "site=auto", world=8)
    before = run.plan()
    assert before.card_bytes == 0 and stack_levers(run, before, try_levers(run, before)) == []


def test_the_longest_row_ends_where_the_positions_do() -> None:
    run = planned(*FEW, "model.rope.scaling=none", "data.seq_len=32768", world=8)
    points = longest(run)
    reach = points[-1].seq_len
    assert all(point.fits for point in points) and reach >= 8192
    assert "data.seq_len" in what_ends(run, points) or "model.rope" in what_ends(run, points)
    with pytest.raises(ConfigError):
        run.plan((("data.seq_len", round(1.02 * reach) + 8192),))


def test_a_search_without_end_says_so() -> None:
    run = planned(*FEW, "site.memory_gib=1e9", "site.host_memory_gib=1e9", world=8)
    points = longest(run)
    assert all(point.fits for point in points) and points[-1].seq_len <= MOST_TOKENS
    assert what_ends(run, points) == "none was looked for"


def test_levers_are_ranked_by_their_price_and_stacked_until_it_fits() -> None:
    run = planned("+exp=qwen3_1m", "memory=checkpoint", "model.architecture.num_hidden_layers=12", world=8)
    before = run.plan()
    assert before.answer == NO
    ranked = try_levers(run, before)
    assert [lever.price for lever in ranked] == sorted(lever.price for lever in ranked)
    for lever in ranked[:3]:
        again = run.plan(lever.changes)
        assert lever.saved_gib == pytest.approx((before.need_bytes - again.need_bytes) / 2**30)
        assert lever.seconds == pytest.approx(again.forecast.time.seconds - before.forecast.time.seconds)
    stacked = stack_levers(run, before, ranked)
    assert stacked and room_left(stacked[-1].found)
    together = tuple(pair for lever in stacked for pair in lever.changes)
    assert run.plan(together).need_bytes == stacked[-1].found.need_bytes
    assert all(not room_left(lever.found) for lever in stacked[:-1]), "no lever more than needed"


def test_a_full_host_is_relieved_first() -> None:
    run = planned(*FEW, "site.host_memory_gib=60", world=8)
    before = run.plan()
    assert before.answer == NO and "host memory" in before.reasons[0]
    stacked = stack_levers(run, before, try_levers(run, before))
    assert stacked[0].host_gib < 0 and room_left(stacked[-1].found)


def test_nothing_is_stacked_on_what_fits() -> None:
    run = planned(*FEW, world=8)
    before = run.plan()
    assert before.answer == FITS and stack_levers(run, before, try_levers(run, before)) == []


def test_the_longest_row_is_the_last_that_fits() -> None:
    run = planned(*FEW, "memory=alst", world=8)
    points = longest(run)
    fitting = [point.seq_len for point in points if point.fits]
    beyond = [point.seq_len for point in points if not point.fits]
    assert fitting == sorted(fitting) and max(fitting) < min(beyond) <= 1.03 * max(fitting)
    assert max(fitting) % (1024 * 8) == 0


def test_a_card_too_small_for_any_row() -> None:
    points = longest(planned(*FEW, "site.memory_gib=4", world=8))
    assert len(points) == 1 and not points[0].fits


def test_the_fewest_gpus_are_the_first_that_fit() -> None:
    points = fewest_gpus(planned("+exp=qwen3_1m", "model.architecture.num_hidden_layers=12", world=8))
    assert [point.fits for point in points] == [False] * (len(points) - 1) + [True]
    assert [point.found.forecast.run["ranks"] for point in points] == [
        2**index for index in range(len(points))
    ]
    none = fewest_gpus(planned(*FEW, "site.memory_gib=4", "site.nodes=2", world=8))
    assert not any(point.fits for point in none) and none[-1].found.forecast.run["ranks"] == 16 < MOST_GPUS


def test_a_curve_has_a_picture(tmp_path: Path) -> None:
    from stack.plan.chart import draw

    points = sweep_lengths(planned(*FEW, world=8), [65536, 131072, 262144])
    live = [point.found.forecast.memory.peak.num_bytes for point in points]
    assert live == sorted(live)
    for point in points:
        assert sum(point.parts().values()) == pytest.approx(
            max(point.found.need_bytes, point.found.forecast.memory.needed_bytes), rel=1e-6
        )
    draw(points, "lengths", tmp_path / "new" / "curve.png")
    draw(points[:1], "one", tmp_path / "bar.png")
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.rglob("*.png"))
    assert len(list(tmp_path.rglob("*.png"))) == 2
