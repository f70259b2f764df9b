"""Errors of identity: answers to clients, and what goes wrong with the store of keys. None repeats a key."""

from __future__ import annotations

from datetime import UTC, datetime

from contracts.errors import ApiError, bad_request, unavailable


class StoreUnusable(Exception):
    """The file of keys can't be read or written."""


class KeyRefused(Exception):
    """What was asked for can't be done with this key; nothing was changed."""


def _unauthorized(message: str) -> ApiError:
    """As OpenAI answers, whose SDK raises AuthenticationError for it."""
    return ApiError(
        401, message, code="invalid_api_key", headers={"www-authenticate": 'Bearer realm="pagefleet"'}
    )


def key_missing() -> ApiError:
    return _unauthorized(
        "An API key is needed: send it as 'Authorization: Bearer pfk_...' or as 'x-api-key'."
    )


def key_unknown() -> ApiError:
    return _unauthorized("This API key is not valid here; check that it was copied whole.")


def key_expired(key_id: str, expired: float) -> ApiError:
    return _unauthorized(f"The API key {key_id} expired at {utc(expired)}; ask for a new one.")


def key_revoked(key_id: str) -> ApiError:
    return _unauthorized(f"The API key {key_id} was revoked; ask for a new one.")


def keys_unavailable() -> ApiError:
    return unavailable("API keys can't be checked now; try again soon.", "keys_unavailable", retry_after=5)


def user_ambiguous() -> ApiError:
    return bad_request(
        "This request has several different X-User-Id headers; the proxy must replace the client's own.",
        code="ambiguous_user",
    )


def utc(moment: float) -> str:
    """``2027-01-31 12:00:00Z`` of a Unix time."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
