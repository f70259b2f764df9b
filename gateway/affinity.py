"""Which replica has a conversation's pages: a pure function of the request's first bytes.

A conversation grows at its end, so its beginning names it. Rendezvous hashing (Thaler, Ravishankar 1998):
a changed set of replicas moves only the conversations of those that went or came.
"""

from __future__ import annotations

import math
import zlib

SEARCHED = 64 * 1024  # bytes of a body in which the prompt must begin
HASHED = 1024  # bytes before the cut that name the conversation
_SYSTEM_LONGEST = 16 * 1024  # bytes of a system prompt behind which the first user's message is looked for
_MASK = 2**64 - 1
_FIELDS = (b'"messages"', b'"prompt"', b'"inputs"', b'"input"')


def conversation_key(body: bytes) -> int | None:
    """A number that later requests of the same conversation share; None when the body shows no prompt.

    Nothing is parsed. Of a chat, the bytes up to the end of the first user's message are taken: they stay
    the same in every turn. The cut is at the first ``}`` after it, be it a part of the text or not, since
    that one stays too. Of other prompts, the first kilobyte.
    """
    for field in _FIELDS:
        start = body.find(field, 0, SEARCHED)
        if start >= 0:
            break
    else:
        return None
    start += len(field)
    if field == b'"messages"' or (field == b'"input"' and b"[" in body[start : start + 8]):
        user = body.find(b'"user"', start, start + _SYSTEM_LONGEST)
        end = body.find(b"}", user, user + HASHED) if user >= 0 else -1
        if end < 0:
            end = max(user, start) + HASHED
    else:
        opening = body.find(b'"', start, start + 16)
        end = body.find(b'"', opening + 1, start + HASHED) if opening >= 0 else -1
        if end < 0:
            end = start + HASHED
    return zlib.crc32(body[max(start, end - 2 * HASHED) : end])


def seed_of(name: str) -> int:
    """What a replica enters the hash with. By slot, so that a restarted process keeps its place."""
    return _mix(zlib.crc32(name.encode("utf-8", "surrogatepass")) + 1)


def score(key: int, seed: int, weight: int) -> float:
    """The replica with the highest score has the conversation; each has its weight's share of them."""
    return weight / -math.log((_mix(key ^ seed) + 0.5) / 2**64)


def _mix(value: int) -> int:
    """The finaliser of SplitMix64: CRCs of different seeds differ by a constant, which is no hash."""
    value = value * 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
