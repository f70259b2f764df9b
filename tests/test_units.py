"""Counts of tokens as vLLM's flags take them."""

from __future__ import annotations

import pytest

from contracts.options import WorkerOptions
from contracts.units import parse_count


@pytest.mark.parametrize(
    ("written", "count"),
    [("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("1m", 1_000_000), ("1M", 1 << 20), ("2.5K", 2560)],
)
def test_counts_in_thousands(written: str, count: int) -> None:
    assert parse_count(written) == count
    assert WorkerOptions.model_validate({"max_model_len": written}).max_model_len == count


@pytest.mark.parametrize("written", [4096, "4096", None, "k", "8x", "-1k", "1kk", True, 8.0])
def test_what_is_no_such_count_is_left_alone(written: object) -> None:
    assert parse_count(written) is written


def test_parts_of_a_token_are_none() -> None:
    with pytest.raises(ValueError, match=r"'1.0001k' is no whole number"):
        parse_count("1.0001k")


@pytest.mark.parametrize(("short", "dtype"), [("half", "float16"), ("float", "float32")])
def test_dtypes_in_short(short: str, dtype: str) -> None:
    assert WorkerOptions.model_validate({"dtype": short, "device": "cuda"}).dtype == dtype
