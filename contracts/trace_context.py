"""W3C Trace Context (w3.org/TR/trace-context): the headers `traceparent` and `tracestate`."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
SAMPLED = 0x01

MAX_STATE = 4096  # bytes; the recommendation asks for at least 512
_MAX_MEMBERS = 32
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?")
_KEY = rb"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_VALUE = rb"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = re.compile(rb"[ \t]*(" + _KEY + rb")=" + _VALUE + rb"[ \t]*")


class TraceContext(NamedTuple):
    """Where a request is in a trace: `parent_id` is the span that sent it. `state` goes on untouched."""

    trace_id: int
    parent_id: int
    sampled: bool
    state: bytes = b""

    @property
    def parent(self) -> bytes:
        """The header `traceparent`."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.parent_id, self.sampled)

    def lines(self) -> bytes:
        """Both headers as lines of a request's head."""
        state = b"tracestate: %b\r\n" % self.state if self.state else b""
        return b"traceparent: %b\r\n%b" % (self.parent, state)


def read_context(parents: Sequence[bytes], states: Sequence[bytes] = ()) -> TraceContext | None:
    """What a request's headers of these names say; None when they are malformed, which the recommendation
    wants treated as absent. A malformed `tracestate` is dropped alone."""
    match = _PARENT.fullmatch(parents[0].strip(b" \t")) if len(parents) == 1 else None
    if match is None:
        return None
    version, trace_id, parent_id, flags = (int(part, 16) for part in match.groups()[:4])
    later = match[5] is not None
    if version == 0xFF or (version == 0 and later) or not trace_id or not parent_id:
        return None
    return TraceContext(trace_id, parent_id, bool(flags & SAMPLED), _read_state(states))


def new_context(sampled: bool) -> TraceContext:
    """The beginning of a trace."""
    return TraceContext(random.getrandbits(128) or 1, random.getrandbits(64) or 1, sampled)


def _read_state(headers: Sequence[bytes]) -> bytes:
    state = b",".join(headers)
    if not state or len(state) > MAX_STATE:
        return b""
    members = [_MEMBER.fullmatch(member) for member in state.split(b",") if member.strip(b" \t")]
    keys = {match[1] for match in members if match is not None}
    # A key that comes twice, or a member that is none, makes the whole of it malformed.
    return state if len(keys) == len(members) <= _MAX_MEMBERS else b""
