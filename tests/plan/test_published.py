"""The forecast's errors against what others measured may not grow."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from stack.plan.verdict import FITS
from tests.plan import published
from tests.plan.published import FILE, Row, answer, beyond_memory, median_error, outcomes, read_rows

MEDIAN = 0.05


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows()


def test_every_row_says_where_it_is_from() -> None:
    with FILE.open(encoding="utf-8", newline="") as text:
        for record in csv.DictReader(text):
            assert record["source"] and record["url"].startswith("https://") and record["how_read"], record[
                "id"
            ]


def test_peaks(rows: list[Row]) -> None:
    found = outcomes(rows, ("peak",))
    assert len(found) >= 12
    assert median_error(found) <= MEDIAN  # 4.3 %
    # Qwen3-8B under FSDP2 and ring attention took 10.9 GiB more than this says, for no reason that its source gives.
    others = [one for one in found if one.row.id != "trl-8b-1m"]
    assert max(abs(one.error) for one in others) <= 0.15


def test_nvidia_smi_readings(rows: list[Row]) -> None:
    """Among them 64 GPUs, where NCCL's buffers, gradients reduced in fp32 and the pools of other streams come in."""
    found = outcomes(rows, ("reserved",))
    assert len(found) >= 5
    assert median_error(found) <= MEDIAN  # 2.8 %
    assert all(-0.05 <= one.error <= 0.10 for one in found), [(one.row.id, one.error) for one in found]


def test_step_times(rows: list[Row]) -> None:
    found = outcomes(rows, ("step_s", "tok_s"))
    assert len(found) >= 7
    assert median_error(found) <= MEDIAN  # 3.7 %
    assert max(abs(one.error) for one in found) <= 0.20


def test_longest_rows(rows: list[Row]) -> None:
    """Too long by up to a quarter where the published length is a limit: what verdict.py's margin is for, which calls none
    of them a fit for certain."""
    found = [one for one in outcomes(rows, ("max_seq",)) if one.row.is_limit]
    assert len(found) >= 6
    assert all(-0.20 <= one.error <= 0.25 for one in found), [(one.row.id, one.error) for one in found]
    assert not [one.row.id for one in found if answer(one.row) == FITS]


def test_no_run_that_was_out_of_memory_is_said_to_fit(rows: list[Row]) -> None:
    found = list(beyond_memory(rows))
    assert len(found) >= 6
    assert not [row.id for row, job in found if answer(row, job) == FITS]


def test_unknown_settings_and_models_are_refused(tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8").splitlines()
    for wrong in (text[1].replace("qwen3-4b", "some-4b"), text[1].replace('""sp""', '""cp""')):
        assert wrong != text[1]
        file = tmp_path / "rows.csv"
        file.write_text(text[0] + "\n" + wrong + "\n")
        with pytest.raises(ValueError, match=r"some-4b|cp"):
            read_rows(file)


def test_what_is_not_known_is_said_by_name(
    rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = FILE.read_text(encoding="utf-8").splitlines()
    first = next(line for line in text if ",peak," in line)
    file = tmp_path / "published.csv"
    other = [first.replace(",peak,", ",watts,"), first.replace(",GiB,", ",MB,")]
    file.write_text("\n".join([text[0], first, *other]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"peak in 'MB', expected GiB or GB"):
        outcomes(read_rows(file), ("peak",))
    published.main([str(file)])
    told = capsys.readouterr().out
    assert "median error" in told
    assert "metric 'watts', expected one of peak, reserved" in told and "not compared: " in told
