"""Limits set while the fleet runs, shared by gateways through Redis.

There they are a hash of subjects, and a number that changes with it: a gateway reads the number a few
times a second, and the hash when that is another one than it knows. What Redis lacks it gets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from gateway.limits.overrides import Entry, Overrides, OverridesUnusable, entry_decoder, newer, remembered
from gateway.limits.redis_link import RedisLink, reason_of

REDIS_SECONDS = 1.0

# KEYS: the hash, the number. ARGV: pairs of subject and entry. Writes what is newer; of equal times the
# caller sends only what should win, and what is no entry loses. The number is a time: a count could come
# again after a restart.
_PUT = """
local function at(entry)
  local good, decoded = pcall(cjson.decode, entry)
  return good and type(decoded) == 'table' and tonumber(decoded.at) or -1
end
for i = 1, #ARGV, 2 do
  local known = redis.call('HGET', KEYS[1], ARGV[i])
  if not known or at(known) <= at(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
local clock = redis.call('TIME')
redis.call('SET', KEYS[2], clock[1] .. '.' .. clock[2])
"""

# KEYS: the hash. ARGV: pairs of subject and entry: those that are still so go. A user of Redis that may not
# take fields away keeps them.
_FORGET = """
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    redis.pcall('HDEL', KEYS[1], ARGV[i])
  end
end
"""

log = logging.getLogger(__name__)


class RedisOverrides:
    """The map of all gateways of a fleet, in Redis. `within`: seconds for one exchange."""

    def __init__(self, url: str, prefix: str = "pagefleet", *, within: float = REDIS_SECONDS) -> None:
        self._link = RedisLink(url)
        self._within = within
        self._hash = f"{prefix}:{{limits}}:set"
        self._number = f"{prefix}:{{limits}}:number"
        self._known: bytes | None = None

    async def exchange(self, ours: Overrides, *, changed: bool) -> dict[str, Entry]:
        """Gives Redis what is newer in `ours`, when that has `changed` or Redis is another than before; what
        is newer there. OverridesUnusable when Redis can't be asked, or has something else in their place."""
        try:
            return await self._exchange(ours, changed)
        except Exception as error:  # the client library's and the system's are many, and all may pass
            raise OverridesUnusable(
                f"limits that are set elsewhere can't be had from Redis at {self._link.address}: "
                f"{reason_of(error)}"
            ) from None

    async def _exchange(self, ours: Overrides, changed: bool) -> dict[str, Entry]:
        async with asyncio.timeout(self._within):
            number = await self._link.execute("GET", self._number)
            if number is not None and number == self._known and not changed:
                return {}
            stored = await self._link.execute("HGETALL", self._hash)
            everything = _decoded(stored)
            ours, theirs = remembered(ours), remembered(everything)
            if gone := [name.encode() for name in everything.keys() - theirs]:
                words = [part for name in gone for part in (name, stored[name])]
                await self._link.execute("EVAL", _FORGET, 1, self._hash, *words)
            if news := newer(ours, theirs):
                words = [part for name, entry in news.items() for part in (name, msgspec.json.encode(entry))]
                await self._link.execute("EVAL", _PUT, 2, self._hash, self._number, *words)
                number = None  # others may have written in between: look again next time
            self._known = number
            return newer(theirs, ours)

    async def aclose(self) -> None:
        await self._link.aclose()


def _decoded(stored: Mapping[bytes, bytes]) -> dict[str, Entry]:
    """What another version wrote and this one can't read is left alone."""
    entries = {}
    for name, value in stored.items():
        try:
            entries[name.decode()] = entry_decoder.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            log.warning("limits set in Redis for %r can't be read by this version", name[:100])
    return entries
