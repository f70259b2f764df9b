"""The gateway's own errors, and how they look before and inside a stream."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from contracts.errors import ApiError, bad_request, internal_error, not_found, unavailable
from contracts.units import format_bytes
from gateway.asgi import JSON, Headers, Send, send_bytes

SSE = b"text/event-stream"
NDJSON = (b"application/x-ndjson", b"application/jsonl", b"application/ndjson")
StreamFormat = Literal["sse", "ndjson"]


async def send_error(send: Send, error: ApiError, headers: Headers | None = None, lines: bytes = b"") -> None:
    """`lines`: more headers, as whole lines."""
    own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    await send_bytes(
        send, error.status, msgspec.json.encode(error.body()), JSON, own + (headers or []), lines
    )


def stream_format(content_type: bytes) -> StreamFormat | None:
    """How errors are written in a stream of this content type; None: it has no room for them."""
    kind = content_type.split(b";", 1)[0].strip().lower()
    if kind == SSE:
        return "sse"
    return "ndjson" if kind in NDJSON else None


def error_event(error: ApiError, stream: StreamFormat, tail: bytes) -> bytes:
    """What ends a broken stream, so that no client takes it for complete.

    `tail` is the end of what was sent: a half-sent event or line is closed first, else the error would be a
    part of it.
    """
    body = msgspec.json.encode(error.body())
    if stream == "sse":
        at_boundary = not tail or tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))
        return (b"" if at_boundary else b"\n\n") + b"data: " + body + b"\n\n"
    return (b"" if not tail or tail.endswith(b"\n") else b"\n") + body + b"\n"


def ends_in_error(stream: StreamFormat | None, tail: bytes, last: bytes) -> bool:
    """Whether a complete body says at its end that it isn't what was asked for. `tail`: its last bytes, at
    least 16; `last`: the last piece of it that came.

    A stream of events without `[DONE]` is one; a stream of lines has an object with an error in its last one.
    """
    if stream is None:
        return False
    if stream == "sse":
        return not tail.rstrip().endswith(b"[DONE]")
    return last[last.rfind(b"\n", 0, -1) + 1 :].startswith(b'{"error"')


def body_too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is over the limit of {limit} bytes ({format_bytes(limit)}); send less, or raise "
        "gateway.max_body.",
        code="request_too_large",
    )


def length_required() -> ApiError:
    return ApiError(
        411,
        "This request has no body: send a JSON object with Content-Length, or chunked.",
        code="length_required",
    )


def pipelined_too_much(limit: int) -> ApiError:
    return bad_request(
        f"More than {format_bytes(limit)} were sent behind requests that were still being answered; send "
        "them on another connection, or after the answer.",
        code="pipelined_too_much",
    )


def unsupported_encoding(encoding: bytes) -> ApiError:
    return ApiError(
        415,
        f"Content-Encoding {encoding[:40].decode('latin-1')!r} is not supported; send the JSON uncompressed.",
        code="unsupported_content_encoding",
    )


def route_not_found(path: str) -> ApiError:
    return not_found(
        f"There is no {path[:200]!r} here; the API is under /v1/: GET /v1/models lists the models, "
        "and GET /health tells whether the gateway runs.",
        code="route_not_found",
    )


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    return ApiError(
        405,
        f"{method[:20]} is not allowed on {path}; use {allowed}.",
        code="method_not_allowed",
        headers={"allow": allowed},
    )


def upgrade_refused() -> ApiError:
    error = bad_request(
        "Connection upgrades (WebSocket, h2c) are not supported; send plain HTTP/1.1, and stream with "
        "server-sent events.",
        code="upgrade_not_supported",
    )
    error.headers["connection"] = "close"
    return error


def model_missing() -> ApiError:
    return bad_request(
        "Which model? Give its name as 'model' in the body, or as ?model= in the address; "
        "GET /v1/models lists them.",
        "model",
        "model_missing",
    )


def model_starting(model: str) -> ApiError:
    return unavailable(f"The model '{model}' is starting; try again soon.", "model_starting", retry_after=5)


def model_unavailable(model: str) -> ApiError:
    return unavailable(
        f"No worker of the model '{model}' can take requests now; try again soon.",
        "model_unavailable",
        retry_after=2,
    )


_OVERLOADED = {
    "full": "too many requests wait for it",
    "late": "this request could not be begun in time",
    "shed": "more urgent requests took its place in the queue",
    "expired": "no worker was free in time",
}


def overloaded(model: str, reason: str, seconds: float) -> ApiError:
    """`reason`: a gateway.queue.Refusal; `seconds`: after which there should be room, by the rate of late."""
    return unavailable(
        f"The model '{model}' is overloaded: {_OVERLOADED[reason]}; try again later, or with fewer requests.",
        "overloaded",
        retry_after=min(3600, math.ceil(seconds)),
    )


def model_held(model: str, reason: str) -> ApiError:
    """The model's worker is being replaced, which takes as long as its start; `reason`: as above."""
    return unavailable(
        f"The model '{model}' is being replaced by another version: {_OVERLOADED[reason]}; try again soon.",
        "model_starting",
        retry_after=5,
    )


def worker_failed(model: str) -> ApiError:
    """The worker took the request and was lost before it answered; it may have worked on it."""
    return internal_error(
        f"The worker of '{model}' failed before it answered; the request was not repeated.",
        "worker_failed",
        502,
    )


def worker_nonsense(model: str) -> ApiError:
    return internal_error(
        f"The worker of '{model}' sent an answer that is no valid HTTP.", "worker_protocol_error", 502
    )


def worker_timeout(model: str, what: str) -> ApiError:
    return internal_error(f"The worker of '{model}' {what}.", "worker_timeout", 504)


def stream_broken(model: str) -> ApiError:
    return internal_error(
        f"The worker of '{model}' failed in the middle of this stream; it is incomplete.",
        "stream_interrupted",
        502,
    )


def shutting_down() -> ApiError:
    return unavailable("The gateway is shutting down; send the request again.", "gateway_shutdown")


def gateway_exhausted() -> ApiError:
    return unavailable(
        "The gateway has no more file descriptors, ports or memory to connect to a worker; try again soon.",
        "gateway_exhausted",
    )


def no_room() -> ApiError:
    return unavailable(
        "The gateway holds as much of large requests as it can; try again soon, or with a smaller one.",
        "gateway_exhausted",
    )


def gateway_bug() -> ApiError:
    return internal_error("The gateway failed on this request; its log says why.")
