"""What gateways and workers take of a request besides what it says: of its head, and how slowly its body may
come. And the answers to what isn't that."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from contracts.errors import ApiError, bad_request

MAX_HEAD: Final = 64 * 1024  # bytes of request line and headers, and of framing between two pieces of a body
HEAD_SECONDS: Final = 30.0  # in which a request's head must arrive
LAST_LOOK_SECONDS: Final = 0.05  # for what lies in the socket of a loop that was busy until it was late
BODY_SECONDS: Final = 60.0  # in which a body may come as slowly as its client likes
SLOWEST_BODY: Final = 1024  # bytes a second, after that and on average
LINGER_SECONDS: Final = 2.0  # in which a client that still sends may read why it is refused


def headers_too_large() -> ApiError:
    return ApiError(
        431, f"Request line and headers are over the limit of {MAX_HEAD} bytes.", code="headers_too_large"
    )


def invalid_http() -> ApiError:
    return bad_request("This is no valid HTTP/1.1 request.", code="invalid_http")


def check_hosts(count: int, version: str) -> None:
    """ApiError 400 unless a head of that HTTP version has as many `Host` headers as it must (RFC 9112)."""
    if count > 1 or (not count and version == "1.1"):
        raise bad_request(
            f"This is no valid HTTP/1.1 request: it needs exactly one Host header, not {count}.",
            code="invalid_http",
        )


def body_deadline(since: float, size: int) -> float:
    """When a body that has come since then, `size` bytes so far, is too slow; in the clock of `since`."""
    return since + BODY_SECONDS + size / SLOWEST_BODY


def body_too_slow() -> ApiError:
    return ApiError(
        408,
        f"The request body comes too slowly: at least {SLOWEST_BODY} bytes a second are needed.",
        code="request_timeout",
    )


def request_timeout(seconds: float) -> ApiError:
    return ApiError(
        408, f"The request did not arrive whole: nothing came for {seconds:g} s.", code="request_timeout"
    )


def last_answer(error: ApiError) -> bytes:
    """All bytes of an answer after which the connection closes, to what was no request."""
    body = msgspec.json.encode(error.body())
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b"
    ) % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), body)
