"""The short form of bench/abort_soak.py: thousands of aborted streams leave nothing behind."""

from __future__ import annotations

from bench.abort_soak import soak


def test_3000_aborted_streams_leave_nothing_in_gateway_and_worker() -> None:
    result = soak("pagefleet", 3000, 32)
    assert result["clean"], result
    assert result["begun"] == 2700
    assert 2700 <= result["after"]["counted_as_left"] <= 3100
    assert result["after"]["worker_saw_aborted"] >= 2700
    assert result["rss_mb_last"] - result["rss_mb_first"] < 12, result["rss_mb"]
