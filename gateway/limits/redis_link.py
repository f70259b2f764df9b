"""The way to Redis: its URL, one script, and nothing of the password in what others see."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import SplitResult, urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, NoScriptError, RedisError

from gateway.limits.rules import Rule

SCRIPT = files("gateway.limits").joinpath("limits.lua").read_text()
CONNECT_S = 1.0

_FORMS = (
    "redis://HOST:PORT/DB, rediss://… (TLS), unix:///PATH, "
    "redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB or redis+cluster://HOST:PORT,HOST:PORT"
)


# Nothing is tried twice in there: a script that seems to have failed may have run. Waits are limited above.
_OPTIONS: dict[str, Any] = {
    "socket_connect_timeout": CONNECT_S,
    "socket_timeout": None,
    "retry": Retry(NoBackoff(), 0),
    "protocol": 2,
}


class RedisUrlError(ValueError):
    """A URL of Redis that can't be used; the text never repeats it, since it may hold a password."""


@dataclass(slots=True)
class Operation:
    """One entry of `limits.lua`'s list, in its words; who waits for it; whose lease and rules it is about."""

    keys: list[str]
    text: str
    replies: int
    lease: str = ""
    rules: Sequence[Rule] = ()
    answer: asyncio.Future[list[int]] | None = None


def slot_tag(key: str) -> str:
    """The part of a key by which a cluster places it."""
    return key[key.index("{") : key.index("}") + 1]


class RedisLink:
    """Runs lists of operations: EVALSHA, then EVAL if the server lacks the script; never SCRIPT LOAD.

    One list after another goes over a connection of its own, which is connected when it has to be: half of
    what the client library takes for a command is finding and checking a connection of its pool.
    """

    def __init__(self, url: str, script: str = SCRIPT) -> None:
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._client, self.is_cluster, self.address = _client(url)
        self._connection = None if self.is_cluster else self._client.connection_pool.make_connection()

    async def run(self, operations: Sequence[Operation]) -> list[list[int]]:
        """Each operation's replies. In a cluster each tag's operations are one call; their order is kept."""
        if not self.is_cluster:
            return await self._call(operations)
        tagged: dict[str, list[int]] = {}
        for index, operation in enumerate(operations):
            tagged.setdefault(slot_tag(operation.keys[0]), []).append(index)
        calls = [self._call([operations[index] for index in part]) for part in tagged.values()]
        answers: list[list[int]] = [[] for _ in operations]
        for part, replies in zip(tagged.values(), await asyncio.gather(*calls), strict=True):
            for index, reply in zip(part, replies, strict=True):
                answers[index] = reply
        return answers

    async def probe(self, key: str) -> None:
        """Raises unless this key's server runs the script and takes writes, over the way that operations
        go: another connection may be let in where theirs isn't, or have been before."""
        await self._call([Operation([key], "hold 1000000 1 probe", 1)])

    async def hang_up(self) -> None:
        """The next command goes over a new connection."""
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)

    async def execute(self, *words: Any) -> Any:
        """A command outside the script."""
        return await self._client.execute_command(*words)

    async def aclose(self) -> None:
        if self._connection is not None:
            await self._connection.disconnect()
        await self._client.aclose()

    async def _call(self, operations: Sequence[Operation]) -> list[list[int]]:
        keys = [key for operation in operations for key in operation.keys]
        arguments = [str(len(keys)), *keys, " ".join([operation.text for operation in operations])]
        try:
            reply = await self._send("EVALSHA", self._sha, *arguments)
        except NoScriptError:
            reply = await self._send("EVAL", self._script, *arguments)
        numbers = [int(word) for word in reply.split()]
        if len(numbers) != sum([operation.replies for operation in operations]):
            raise InvalidResponse("an answer to something else")
        answers, start = [], 0
        for operation in operations:
            answers.append(numbers[start : start + operation.replies])
            start += operation.replies
        return answers

    async def _send(self, *words: str) -> Any:
        if self._connection is None:
            return await self._client.execute_command(*words)
        if not self._connection.is_connected:
            await self._connection.connect()
        await self._connection.send_packed_command(_packed(words), check_health=False)
        return await self._connection.read_response()


def _packed(words: Sequence[str]) -> bytes:
    """A command as Redis reads it (RESP)."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word.encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def reason_of(error: BaseException) -> str:
    """What went wrong, in words that hold no address or password: the class and the server's error code."""
    code = str(error).split(" ", 1)[0]
    name = type(error).__name__
    return f"{name} {code}" if code.isascii() and code.isalpha() and code.isupper() else name


def check_url(url: str) -> None:
    """RedisUrlError unless it can be one; nothing is connected."""
    _client(url)


def hidden(url: str) -> str:
    """The URL without its credentials and options, to be shown."""
    parts = urlsplit(url)
    _, at, place = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{'***@' if at else ''}{place}{parts.path}{'?***' if parts.query else ''}"


def _client(url: str) -> tuple[Any, bool, str]:
    """(client, whether it is a cluster, the address without credentials)."""
    try:
        parts = urlsplit(url)
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        scheme, _, form = parts.scheme.partition("+")
        if scheme not in ("redis", "rediss", "unix") or (form and scheme == "unix"):
            raise ValueError
        if form == "sentinel":
            return _sentinel(parts), False, address
        if form == "cluster":
            return _cluster(parts), True, address
        client = Redis.from_url(url, **_OPTIONS)
        client.connection_pool.make_connection()  # refuses unknown options of the URL, which the pool doesn't
        return client, False, address
    except (ValueError, TypeError, IndexError, RedisError):
        raise RedisUrlError(f"the Redis URL can't be used; it must look like {_FORMS}") from None


def _sentinel(parts: SplitResult) -> Any:
    hosts, options = _several(parts)
    asking = _OPTIONS | {"socket_connect_timeout": CONNECT_S / 4, "socket_timeout": CONNECT_S / 4}
    asking |= {name: options[name] for name in options if name.startswith("ssl")}
    for name in ("username", "password"):
        if (value := options.pop(f"sentinel_{name}", None)) is not None:
            asking[name] = value
    master, _, database = parts.path.strip("/").partition("/")
    if not master:
        raise ValueError
    client = Sentinel(hosts, sentinel_kwargs=asking, **options | {"db": int(database or 0)}).master_for(
        master
    )
    client.connection_pool.make_connection()
    return client


def _cluster(parts: SplitResult) -> Any:
    hosts, options = _several(parts)
    return RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in hosts], **options)


def _several(parts: SplitResult) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """The hosts, and the options from credentials and query."""
    scheme = parts.scheme.partition("+")[0]
    credentials, at, hosts = parts.netloc.rpartition("@")
    options = dict(parse_url(f"{scheme}://{credentials}{at}host?{parts.query}"))
    del options["host"]
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    places = [urlsplit("//" + host) for host in hosts.split(",")]
    if not all(place.hostname for place in places):
        raise ValueError
    default = 26379 if parts.scheme.endswith("sentinel") else 6379
    return [(str(place.hostname), place.port or default) for place in places], _OPTIONS | options
