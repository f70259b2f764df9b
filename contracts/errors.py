"""The one error shape of every endpoint: ``{"error": {"message", "type", "param", "code"}}``.

The types and codes are those that OpenAI's SDK maps to its exception classes.
"""

from __future__ import annotations

import re
from typing import Any

MAX_MESSAGE = 1500  # characters


def bounded(message: str, longest: int = MAX_MESSAGE) -> str:
    """The message without its middle where it is too long: it may quote what a client sent, of any size, and
    its end is as much needed as its beginning."""
    half = longest // 2
    return message if len(message) <= longest else f"{message[:half]} ... {message[-half:]}"


class ApiError(Exception):
    """An answer that isn't 2xx: `status`, and the four fields of the body.

    `message` names the field, the limit and the way out; it never holds a prompt or a key, and is bounded.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.message = bounded(message)
        super().__init__(self.message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(404, message, type="not_found_error", param=param, code=code)


def model_not_found(model: str) -> ApiError:
    return not_found(
        f"The model '{model[:200]}' does not exist here; GET /v1/models lists the models.",
        "model",
        "model_not_found",
    )


def unavailable(
    message: str, code: str, retry_after: float = 1, headers: dict[str, str] | None = None
) -> ApiError:
    """503 with Retry-After in whole seconds: try again, nothing was done."""
    return ApiError(
        503,
        message,
        type="service_unavailable_error",
        code=code,
        headers={"retry-after": str(max(1, round(retry_after))), **(headers or {})},
    )


def internal_error(message: str, code: str = "internal_error", status: int = 500) -> ApiError:
    return ApiError(status, message, type="server_error", code=code)


_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_HALF_REASON = (
    r"a string has half of a surrogate pair (like \ud83d), as text has that was cut within a character; send "
    "whole characters"
)


def invalid_json(error: Exception, body: bytes) -> ApiError:
    """400 for a body that msgspec can't read: what half a character is to it depends on what comes behind."""
    reason = str(error)
    cut = "truncated" in reason or "hex escape" in reason
    if "surrogate" in reason or (cut and _HALF_PAIR.search(body)):
        reason = _HALF_REASON
    return bad_request(f"The request body is not valid JSON: {reason}.", code="invalid_json")
