"""A client's request: its body, bounded and untouched, and the few things the gateway reads in it."""

from __future__ import annotations

import itertools
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec

from contracts.errors import bad_request, invalid_json
from contracts.headers import PATIENCE
from contracts.trace_context import TRACEPARENT, TRACESTATE, TraceContext, read_context
from gateway.asgi import Receive, Scope
from gateway.errors import body_too_large, length_required, model_missing, no_room, unsupported_encoding
from gateway.limits.estimate import sequences

EMBEDDINGS = "/v1/embeddings"
MAX_SEQUENCES = 16  # more would keep all others waiting until the last of them has ended
MAX_PARAMETERS = 100  # of a query
MOST_HELD = 1024**3  # bytes
FORWARDED = {b"content-type": 1, b"accept": 2}  # bits
_PATIENCE = PATIENCE.encode()
_TRACE_HEADERS = (TRACEPARENT.encode(), TRACESTATE.encode())
_READ = frozenset(
    (
        *FORWARDED,
        *_TRACE_HEADERS,
        b"content-length",
        b"transfer-encoding",
        b"content-encoding",
        b"x-request-id",
        _PATIENCE,
    )
)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_PROCESS = secrets.token_hex(8).encode()  # with a number, unique over all gateways and restarts
_serial = itertools.count(1)


class ClientGone(Exception):
    """The client closed its connection."""


class _Wanted(msgspec.Struct):
    """What is read of a body; everything else in it is skipped, checked only for being JSON."""

    model: Any = None
    model_name: Any = None
    user: Any = None
    stream: Any = None
    n: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


class _Outline(msgspec.Struct):
    """The same, with nothing decoded: of a large body, where any of it may be millions of objects."""

    model: msgspec.Raw = msgspec.Raw(b"")
    model_name: msgspec.Raw = msgspec.Raw(b"")
    user: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")
    n: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Wanted)
_outline_decoder = msgspec.json.Decoder(_Outline)
_LARGE = 1 << 16  # bytes of a body
_LONG = 4096  # bytes of a value that isn't text: more than any that is of use here


@dataclass(slots=True)
class Head:
    """The headers that matter. `forwarded`: those that go on to the worker, one of each name, as lines;
    `trace`: where the request is in a trace, which goes on as well; `patience`: seconds that the client will
    wait until it is begun."""

    request_id: bytes
    forwarded: bytes
    trace: TraceContext | None = None
    patience: float | None = None
    length: int | None = None
    framed: bool = False
    encoding: bytes | None = None


@dataclass(slots=True)
class Inbound:
    """`user`: what the body says, true or not."""

    body: bytes
    model: str
    user: str | None = None
    model_in_query: bool = False  # the body names none, so the worker must be told beside it
    streams: bool = False  # the answer comes in pieces, so its head comes early
    sequences: int = 1  # that a worker computes for it, as far as they count


def _patience(value: bytes) -> float | None:
    """What `x-request-timeout` says; None when that is no time."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


def read_head(scope: Scope) -> Head:
    """`request_id` is the client's own if it is one, else a new one."""
    head = Head(b"", b"")
    traced: list[tuple[bytes, bytes]] = []
    sent = 0
    for name, value in scope["headers"]:
        if name not in _READ:
            continue
        flag = FORWARDED.get(name)
        if flag is not None:
            if not sent & flag:
                sent |= flag
                head.forwarded += b"%b: %b\r\n" % (name, value)
        elif name == b"content-length":
            head.length, head.framed = int(value), True
        elif name == b"transfer-encoding":
            head.framed = True
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            head.encoding = value
        elif name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            head.request_id = value
        elif name == _PATIENCE:
            head.patience = _patience(value)
        elif name == b"traceparent" or name == b"tracestate":
            traced.append((name, value))
    if traced:
        head.trace = read_context(*([v for n, v in traced if n == name] for name in _TRACE_HEADERS))
    head.request_id = head.request_id or b"%b-%x" % (_PROCESS, next(_serial))
    return head


def request_id(scope: Scope) -> bytes:
    """The same each time, for requests that are answered without a worker."""
    if "request_id" not in scope:
        scope["request_id"] = read_head(scope).request_id
    known: bytes = scope["request_id"]
    return known


def check_framing(head: Head, max_body: int) -> None:
    """ApiError for a body that can't be served, by what its head says."""
    if head.encoding is not None:
        raise unsupported_encoding(head.encoding)
    if not head.framed:
        raise length_required()
    if head.length is not None and head.length > max_body:
        raise body_too_large(max_body)


class Room:
    """The memory for bodies that come in pieces, of all requests together; `held`: bytes of it in use;
    `on_full` is called for each request that gets none.

    Limits on requests hold for whole ones only: whoever may send one could begin a thousand of them.
    """

    def __init__(self, on_full: Callable[[], None]) -> None:
        self.held = 0
        self._on_full = on_full

    async def read_body(self, receive: Receive, max_body: int) -> bytes:
        """The whole body, untouched, to be freed with `free`. ApiError when it is too long or there is no
        room, ClientGone when the client leaves."""
        body = bytearray()  # many small pieces would take many times their size
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                body += piece
                self.held += len(piece)
                if len(body) > max_body:
                    raise body_too_large(max_body)
                if self.held > max(MOST_HELD, max_body):
                    self._on_full()
                    raise no_room()
                if not message.get("more_body"):
                    return bytes(body)
        except BaseException:
            self.free(body)
            raise

    def free(self, body: bytes | bytearray) -> None:
        self.held -= len(body)


def parse_body(body: bytes, scope: Scope) -> Inbound:
    """Model name and the like; ApiError 400 when the body is no JSON object or names no model."""
    wanted = _decode(body)
    in_query = not (wanted.model or wanted.model_name)
    streams = wanted.stream is True or scope["path"] == "/generate_stream"
    user = wanted.user if isinstance(wanted.user, str) else None
    count = 1
    if wanted.n is not None or wanted.prompt:
        count = min(sequences(wanted.n, bytes(wanted.prompt)), MAX_SEQUENCES)
    elif wanted.input and scope["path"] == EMBEDDINGS:
        count = min(sequences(None, bytes(wanted.input)), MAX_SEQUENCES)
    return Inbound(body, _model_name(wanted, scope), user, in_query, streams, count)


def _decode(body: bytes) -> _Wanted:
    if not body or body.isspace():
        raise bad_request("The request body is empty; a JSON object is needed.", code="invalid_json")
    try:
        return _decoder.decode(body) if len(body) <= _LARGE else _decode_large(body)
    except msgspec.ValidationError as error:
        raise bad_request(f"The request body must be a JSON object: {error}.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(error, body) from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None


def _decode_large(body: bytes) -> _Wanted:
    outline = _outline_decoder.decode(body)
    values = {name: _value(getattr(outline, name)) for name in ("model", "model_name", "user", "stream", "n")}
    return _Wanted(**values, prompt=outline.prompt, input=outline.input)


def _value(raw: msgspec.Raw) -> Any:
    """The value, or what is no value of use: it stays as it is."""
    if not raw:
        return None
    text = bytes(raw)
    return msgspec.json.decode(text) if text.startswith(b'"') or len(text) <= _LONG else raw


def _model_name(wanted: _Wanted, scope: Scope) -> str:
    for param, value in (("model", wanted.model), ("model_name", wanted.model_name)):
        if value is None or value == "":
            continue
        if isinstance(value, str):
            return value
        raise bad_request(f"'{param}' must be a string.", param, "invalid_type")
    query: bytes = scope["query_string"]
    try:
        names = parse_qs(query.decode("latin-1"), max_num_fields=MAX_PARAMETERS).get("model")
    except ValueError:
        raise bad_request(
            f"The address has over {MAX_PARAMETERS} parameters; name the model in the body.",
            code="invalid_http",
        ) from None
    if not names:
        raise model_missing()
    return names[0]
