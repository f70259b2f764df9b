"""Figures in the documentation against the files in bench/results."""

from __future__ import annotations

import json
import re

import pytest

from bench.plots import figures
from tests.conftest import ROOT
from tests.test_docs import tables

PERFORMANCE = ROOT / "docs" / "performance.md"


def test_figures_are_drawn_from_the_result_files() -> None:
    """`python -m bench.plots` draws them again."""
    drawn = figures()
    assert drawn
    for path, text in drawn.items():
        assert path.read_text() == text, path.name
        assert f"figures/{path.name}" in PERFORMANCE.read_text()


@pytest.mark.parametrize("file", ["gpu_engine_h200.json", "gpu_engine_fp8.json"])
def test_rows_of_the_engine_are_those_of_its_result_file(file: str) -> None:
    result = json.loads((ROOT / "bench/results" / file).read_text())
    measured = {f"{row['row']}, {row['unit']}": row for row in result["rows"]}
    tables_of_it = [rows for heading, _, rows in tables(PERFORMANCE) if file in heading]
    assert tables_of_it
    for rows in tables_of_it:
        shown = {row[0]: row[1:] for row in rows if row[0] in measured}
        assert shown.keys() == measured.keys()
        for name, (ours, peer, aim, met) in shown.items():
            row = measured[name]
            assert float(ours) == pytest.approx(row["ours"], rel=0.006), name
            assert float(peer) == pytest.approx(row["vllm"], rel=0.006), name
            reached = row["ours"] >= row["bar"] if "req/s" in name else row["ours"] <= row["bar"]
            assert float(aim) == row["bar"], name
            assert met == ("yes" if reached else "no"), name


def test_figures_have_a_result_file() -> None:
    """A results table of performance.md is empty unless the file that its heading names is there."""
    for heading, _, rows in tables(PERFORMANCE):
        for file in re.findall(r"`(bench/results/[\w.]+)`", heading):
            if not (ROOT / file).exists():
                assert not any(cell for row in rows for cell in row[1:]), f"{heading}: figures without a file"


DIGITS = {  # behind the point, of the gateway's columns
    "requests_per_second": 0, "cpu_us_per_request": 0, "added_p50_ms": 2, "added_p99_ms": 2,
    "added_rate_p99_ms": 2, "events_per_second": 0, "cpu_us_per_event": 1, "added_first_event_ms": 2,
}  # fmt: skip


@pytest.mark.parametrize("file", ["gateway_overhead.json", "gateway_overhead_16core.json"])
def test_rows_of_the_gateway_are_those_of_its_result_file(file: str) -> None:
    result = json.loads((ROOT / "bench/results" / file).read_text())
    measured = [
        [
            "–" if (value := row.get(column)) is None else f"{value:.{digits}f}"
            for column, digits in DIGITS.items()
        ]
        for row in result["rows"]
    ]
    shown = [
        row[1:]
        for heading, header, rows in tables(PERFORMANCE)
        if "gateway_overhead" in heading and header[0] == "way"
        for row in rows
    ]
    assert any(shown[at : at + len(measured)] == measured for at in range(len(shown)))


def test_bars_of_the_gateway_are_those_of_its_result_file() -> None:
    result = json.loads((ROOT / "bench/results" / "gateway_overhead.json").read_text())
    shown = {
        row[0]: (float(row[1]), float(row[2].lstrip("≥≤ ")), row[3])
        for heading, header, rows in tables(PERFORMANCE)
        if "gateway_overhead" in heading and header[0] == ""
        for row in rows
    }
    assert shown.keys() == {bar["what"] for bar in result["bars"]}
    for bar in result["bars"]:
        value, aim, met = shown[bar["what"]]
        assert value == pytest.approx(bar["value"], abs=0.0051)
        assert aim == bar.get("at_least", bar.get("at_most"))
        assert met == ("yes" if bar["met"] else "no")
