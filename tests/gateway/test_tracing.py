"""Trace headers through the gateway, with tracing on and off."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.gateway.rig import Rig, one_worker
from tests.otlp_collector import collector

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{CALLER}-01"


async def passed_on(rig: Rig, *headers: tuple[str, str]) -> dict[str, str]:
    """The trace headers that the worker gets."""
    assert (await rig.post(headers=list(headers))).status_code == 200
    seen = rig.workers[0].requests[-1].headers
    return {name: value for name, value in seen.items() if name.startswith("trace")}


async def test_without_tracing_a_good_trace_goes_on_as_it_is(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        assert await passed_on(rig) == {}
        assert await passed_on(rig, ("traceparent", GOOD)) == {"traceparent": GOOD}
        assert await passed_on(
            rig, ("Traceparent", GOOD[:-2] + "00"), ("tracestate", "a=1"), ("TraceState", "b=2")
        ) == {"traceparent": GOOD[:-2] + "00", "tracestate": "a=1,b=2"}
        assert await passed_on(rig, ("traceparent", GOOD), ("tracestate", "no state")) == {
            "traceparent": GOOD
        }


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "nonsense")],
        [("traceparent", GOOD.upper())],
        [("traceparent", GOOD), ("traceparent", GOOD)],
        [("tracestate", "a=1")],
        [("traceparent", "00-" + "0" * 32 + "-" + CALLER + "-01"), ("tracestate", "a=1")],
    ],
)
async def test_a_malformed_trace_is_dropped(tmp_path: Path, headers: list[tuple[str, str]]) -> None:
    async with one_worker(tmp_path) as rig:
        assert await passed_on(rig, *headers) == {}


async def test_with_tracing_the_worker_is_told_of_the_gateways_span(tmp_path: Path) -> None:
    with collector() as received:
        async with one_worker(tmp_path, tracing={"endpoint": received.url}) as rig:
            told = await passed_on(rig, ("traceparent", GOOD), ("tracestate", "a=1"))
            version, trace, span, flags = told["traceparent"].split("-")
            assert (version, trace, flags, told["tracestate"]) == ("00", TRACE, "01", "a=1")
            assert span != CALLER
            made = (await passed_on(rig))["traceparent"].split("-")
            assert made[3] == "01"
            unsampled = GOOD[:-2] + "00"
            assert await passed_on(rig, ("traceparent", unsampled)) == {"traceparent": unsampled}
            (await rig.ask(do="status", status=500)).read()
            (await rig.post({"model": "none"})).read()
        assert received.of(TRACE)[0].span_id == span
        assert received.of(made[1])[0].span_id == made[2]
        statuses = Counter(span.attributes["http.response.status_code"] for span in received.spans)
        assert statuses == {200: 2, 500: 1, 404: 1}
        assert [span.failed for span in received.spans].count(True) == 1


async def test_a_share_is_sampled_and_the_rest_says_so(tmp_path: Path) -> None:
    with collector() as received:
        tracing = {"endpoint": received.url, "sample_ratio": 0.3}
        async with one_worker(tmp_path, tracing=tracing) as rig:
            told = [(await passed_on(rig))["traceparent"] for _ in range(200)]
        sampled = [value for value in told if value.endswith("-01")]
        assert len({value.split("-")[1] for value in told}) == 200
        assert 25 <= len(sampled) <= 95
        assert {span.trace_id for span in received.spans} == {value.split("-")[1] for value in sampled}
