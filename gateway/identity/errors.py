"""Errors of identity: answers to clients, and what goes wrong with the store of keys. None repeats a key."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from contracts.errors import ApiError, bad_request, unavailable


class StoreUnusable(Exception):
    """The file of keys can't be read or written."""


class KeyRefused(Exception):
    """What was asked for can't be done with this key; nothing was changed."""


_CHALLENGE = 'Bearer realm="pagefleet"'


def _unauthorized(message: str) -> ApiError:
    """As OpenAI answers, whose SDK raises AuthenticationError for it."""
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": _CHALLENGE})


def key_missing() -> ApiError:
    return _unauthorized(
        "An API key is needed: send it as 'Authorization: Bearer pfk_...' or as 'x-api-key'."
    )


def credentials_missing() -> ApiError:
    return _unauthorized(
        "A token or an API key is needed: send it as 'Authorization: Bearer ...', a key also as 'x-api-key'."
    )


def key_unknown() -> ApiError:
    return _unauthorized("This API key is not valid here; check that it was copied whole.")


def key_expired(key_id: str, expired: float) -> ApiError:
    return _unauthorized(f"The API key {key_id} expired at {utc(expired)}; ask for a new one.")


def key_revoked(key_id: str) -> ApiError:
    return _unauthorized(f"The API key {key_id} was revoked; ask for a new one.")


def keys_unavailable() -> ApiError:
    return unavailable("API keys can't be checked now; try again soon.", "keys_unavailable", retry_after=5)


class KeysStale(Exception):
    """A token may count after all once the issuer's keys have been fetched again; else `answer` holds."""

    def __init__(self, answer: ApiError) -> None:
        super().__init__(answer.message)
        self.answer = answer


def _token_refused(reason: str) -> ApiError:
    """With the challenge of RFC 6750; `reason` holds nothing of the token."""
    challenge = f'{_CHALLENGE}, error="invalid_token", error_description="{reason}"'
    return ApiError(
        401,
        f"This token does not count here: {reason}.",
        code="invalid_token",
        headers={"www-authenticate": challenge},
    )


def signing_key_unknown() -> ApiError:
    return _token_refused("no key of the issuer has signed it")


def signing_keys_missing() -> ApiError:
    return unavailable(
        "Tokens can't be checked now: the issuer's keys can't be had; try again soon.",
        "keys_unavailable",
        retry_after=5,
    )


def token_too_long(limit: int) -> ApiError:
    return _token_refused(f"it has more than {limit} bytes")


def token_malformed() -> ApiError:
    return _token_refused("it is neither a signed JWT nor an API key")


def token_type() -> ApiError:
    return _token_refused("it was made for something else than access")


def token_algorithm(allowed: Iterable[str]) -> ApiError:
    return _token_refused(f"it must be signed with {' or '.join(allowed)}")


def token_signature() -> ApiError:
    return _token_refused("its signature is wrong")


def token_expired() -> ApiError:
    return _token_refused("it has expired")


def token_claim_missing(claim: str) -> ApiError:
    return _token_refused(f"it has no usable claim '{claim}'")


_WRONG_CLAIMS = {
    "iss": "it is another issuer's",
    "aud": "it is for another audience",
    "nbf": "it is not valid yet",
    "iat": "it was issued in the future",
    "email_verified": "its e-mail address is not verified",
}


def token_claim_wrong(claim: str) -> ApiError:
    return _token_refused(_WRONG_CLAIMS.get(claim, f"its claim '{claim}' is wrong"))


def user_ambiguous() -> ApiError:
    return bad_request(
        "This request has several different X-User-Id headers; the proxy must replace the client's own.",
        code="ambiguous_user",
    )


def credentials_ambiguous() -> ApiError:
    return bad_request(
        "This request has several different credentials in one header; send one key or token.",
        code="ambiguous_credentials",
    )


def utc(moment: float) -> str:
    """``2027-01-31 12:00:00Z`` of a Unix time."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
