"""Trace headers as W3C writes them, and spans on their way to a collector that works, fails or hangs."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import spans as spans_module
from contracts.spans import Spans, checked_endpoint, context_of, fail
from contracts.trace_context import TraceContext, new_context, read_context
from tests.otlp_collector import collector

GOOD = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


def test_a_traceparent() -> None:
    context = read_context([GOOD], [b"a=1", b"b=2"])
    assert context == TraceContext(TRACE, SPAN, True, b"a=1,b=2")
    assert context.parent == GOOD
    assert context.lines() == b"traceparent: %b\r\ntracestate: a=1,b=2\r\n" % GOOD
    unsampled = read_context([b" " + GOOD[:-2] + b"00\t"])
    assert unsampled == TraceContext(TRACE, SPAN, False)
    assert read_context([GOOD[:-2] + b"03"]) == TraceContext(TRACE, SPAN, True)


def test_later_versions_are_read_as_far_as_this_one_goes() -> None:
    for value in (b"cc" + GOOD[2:], b"cc" + GOOD[2:] + b"-what the future brings"):
        context = read_context([value])
        assert context is not None
        assert context.parent == GOOD


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        GOOD[:-1],
        GOOD + b"0",
        GOOD + b"-00",
        GOOD.upper(),
        GOOD.replace(b"-", b"_"),
        b"ff" + GOOD[2:],
        b"00-" + b"0" * 32 + GOOD[35:],
        GOOD[:36] + b"0" * 16 + b"-01",
        GOOD[:-2] + b"0x",
        b"cc" + GOOD[2:] + b".more",
        GOOD + b"\r\nx-evil: 1",
        b"\xff" + GOOD,
    ],
)
def test_malformed_ones_are_none(value: bytes) -> None:
    assert read_context([value]) is None


def test_two_are_none() -> None:
    assert read_context([GOOD, GOOD]) is None
    assert read_context([]) is None


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", True),
        (b"a=1, b=2 ,,\tc=3", True),
        (b"fw529a3039@dt=FfAaB1,0tenant@sys=x y", True),
        (b",".join(b"k%d=v" % n for n in range(32)), True),
        (b",".join(b"k%d=v" % n for n in range(33)), False),
        (b"a=1,a=2", False),
        (b"A=1", False),
        (b"a", False),
        (b"a=", False),
        (b"=1", False),
        (b"a=1=2", False),
        (b"a=\xc3\xa9", False),
        (b"a=1\r\nx: y", False),
        (b"a=" + b"1" * 257, False),
        (b"k=" + b"v" * 250 + b"," * 4000, False),
    ],
)
def test_a_tracestate_is_kept_whole_or_dropped_alone(state: bytes, kept: bool) -> None:
    context = read_context([GOOD], [state])
    assert context is not None
    assert context.state == (state if kept else b"")


@given(st.binary(max_size=80), st.binary(max_size=200))
def test_nothing_that_is_read_breaks_a_head(parent: bytes, state: bytes) -> None:
    for context in (read_context([parent], [state]), read_context([GOOD], [state])):
        if context is not None:
            lines = context.lines()
            assert lines.count(b"\n") == lines.count(b"\r\n") == (2 if context.state else 1)
            assert read_context([context.parent], [context.state]) == context


def test_a_trace_begins() -> None:
    one, two = new_context(True), new_context(False)
    assert read_context([one.parent]) == one
    assert read_context([two.parent]) == two
    assert one.trace_id != two.trace_id


# --- the way to a collector


def test_addresses() -> None:
    assert checked_endpoint(None) is None
    assert checked_endpoint("http://127.0.0.1:4318") == "http://127.0.0.1:4318/v1/traces"
    assert checked_endpoint("https://collector/") == "https://collector/v1/traces"
    assert checked_endpoint("http://collector:4318/own/path") == "http://collector:4318/own/path"
    for bad in ("collector:4318", "grpc://collector:4317", "http://", "http://user:secret@collector"):
        with pytest.raises(ValueError, match="a collector's address is needed") as caught:
            checked_endpoint(bad)
        assert "secret@" not in str(caught.value)


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "_SDK", "opentelemetry.not_installed.at_all")
    with pytest.raises(ValueError, match=r"pip install 'pagefleet\[tracing\]'"):
        checked_endpoint("http://collector")


def test_the_library_is_not_loaded_where_tracing_is_off() -> None:
    """Neither by a gateway nor by a worker's server."""
    for modules in ("gateway.server, gateway.__main__", "worker.server.lifecycle, worker.config"):
        code = f"import sys, {modules}; print(*[m for m in sys.modules if m.startswith('opentelemetry')])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == ""


def test_spans_arrive() -> None:
    with collector() as received:
        spans = Spans(checked_endpoint(received.url) or "", "pagefleet-test", "t.1")
        remote = TraceContext(TRACE, SPAN, True)
        outer = spans.start("outer", remote, server=True, attributes={"a": 1})
        inner = spans.start("inner", outer, started=1_000)
        inner.end(2_000)
        fail(outer, "status 500")
        outer.end()
        root = spans.start("root", None)
        root.end()
        spans.close()
        found = {span.name: span for span in received.spans}
        assert received.paths == {"/v1/traces"}
        assert set(found) == {"outer", "inner", "root"}
        assert found["outer"].trace_id == f"{TRACE:032x}"
        assert found["outer"].parent_id == f"{SPAN:016x}"
        assert found["outer"].attributes == {"a": 1}
        assert (found["outer"].failed, found["inner"].failed) == (True, False)
        assert found["inner"].parent_id == found["outer"].span_id
        assert (found["inner"].start, found["inner"].end) == (1_000, 2_000)
        assert found["root"].parent_id == ""
        assert found["root"].trace_id != found["outer"].trace_id
        assert context_of(outer).parent.decode() == f"00-{TRACE:032x}-{found['outer'].span_id}-01"
        assert found["outer"].resource["service.name"] == "pagefleet-test"
        assert found["outer"].resource["service.instance.id"] == "t.1"


@pytest.mark.parametrize("trouble", ["refuses", "fails", "hangs"])
def test_a_collector_in_trouble_holds_nobody_up(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with collector() as received:
        url = received.url
        if trouble == "refuses":
            with socket.create_server(("127.0.0.1", 0)) as taken:
                url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        elif trouble == "fails":
            received.status = 500
        else:
            received.delay = 4.0
        spans = Spans(checked_endpoint(url) or "", "pagefleet-test", "t.1")
        began = time.monotonic()
        for _ in range(6000):  # far more than the queue holds
            spans.start("s", None).end()
        assert time.monotonic() - began < 24.0  # half of what a dozen batches take that hang
        began = time.monotonic()
        spans.close()
        assert time.monotonic() - began < spans_module.CLOSE_SECONDS + 10.0
        assert len(caplog.records) <= 6
