"""One finished request, as the proxy notes it and as the audit file says it."""

from __future__ import annotations

import re
import time
from functools import lru_cache

import msgspec

from contracts.usage import Usage

MAX_BODY = 16 * 1024  # bytes of a request's body in its audit line, where prompts are wanted

# In UTF-8: DEL and the controls of Latin-1 (a terminal obeys U+009B), marks that turn the direction of text
# or take no space, and what some readers take for the end of a line.
_UNSEEN = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\x8b-\x8f\xa8-\xae]|\xe2\x81[\xa0-\xaf]|\xd8\x9c|\xef\xbb\xbf"
)


class Record(msgspec.Struct, frozen=True, gc=False):
    """A request that is over, whatever became of it. Cheap to make: everything else is done off the path.

    `at`: Unix time of its arrival. `first_token`: seconds until its answer began. `user`: None when it was
    refused before anybody knew. `model`, `target`: "" when it got none. `usage`: None where no worker said.
    `code`: of the gateway's own error. `body`: at most `MAX_BODY` bytes, only where prompts are wanted.
    """

    at: float
    seconds: float
    first_token: float | None
    request_id: bytes
    path: bytes
    status: int
    code: str | None
    user: str | None
    key_id: str | None
    model: str
    target: str
    usage: Usage | None
    body: bytes | None = None


class AuditLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A line of the audit file; what isn't known is left out. `time`: as in 2027-01-31T12:00:00.123Z.
    `body`: with `gateway.audit.prompts` only."""

    time: str
    request_id: str
    path: str
    status: int
    seconds: float
    first_token_seconds: float | None = None
    user: str | None = None
    key_id: str | None = None
    model: str = ""
    target: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    code: str | None = None
    body: str | None = None


def line_of(record: Record) -> AuditLine:
    first, usage, body = record.first_token, record.usage, record.body
    return AuditLine(
        _utc(record.at),
        record.request_id.decode("latin-1"),
        record.path.decode("latin-1"),
        record.status,
        _microseconds(record.seconds),
        None if first is None else _microseconds(first),
        record.user,
        record.key_id,
        record.model,
        record.target,
        None if usage is None else usage.prompt_tokens,
        None if usage is None else usage.completion_tokens,
        None if usage is None else usage.cached_tokens,
        "" if usage is None else usage.finish_reason,
        record.code,
        None if body is None else body.decode("utf-8", "replace"),
    )


def inert(json: bytes) -> bytes:
    """JSON that says the same, with escapes for what a terminal would obey or not show: clients choose names,
    and JSON itself escapes only the controls of ASCII."""
    if json.isascii() and b"\x7f" not in json:
        return json
    return _UNSEEN.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), json)


def _microseconds(seconds: float) -> float:
    return int(seconds * 1e6) / 1e6


_MILLISECONDS = [f".{number:03d}Z" for number in range(1000)]


def _utc(moment: float) -> str:
    """A quarter of what datetime takes for it: there is a line for each request."""
    second = int(moment)
    return _second(second) + _MILLISECONDS[int((moment - second) * 1000)]


@lru_cache(maxsize=16)
def _second(moment: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
