"""What gateways and workers take of a request before its body, and the answers to what isn't that."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from contracts.errors import ApiError, bad_request

MAX_HEAD: Final = 64 * 1024  # bytes of request line and headers, and of framing between two pieces of a body
HEAD_SECONDS: Final = 30.0  # in which a request's head must arrive
LAST_LOOK_SECONDS: Final = 0.05  # for what lies in the socket of a loop that was busy until it was late
LINGER_SECONDS: Final = 2.0  # in which a client that still sends may read why it is refused


def headers_too_large() -> ApiError:
    return ApiError(
        431, f"Request line and headers are over the limit of {MAX_HEAD} bytes.", code="headers_too_large"
    )


def invalid_http() -> ApiError:
    return bad_request("This is no valid HTTP/1.1 request.", code="invalid_http")


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
