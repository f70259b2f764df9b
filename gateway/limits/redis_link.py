"""The way to Redis: its URL, one script, and nothing of the password in what others see."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, NoScriptError, RedisError

from gateway.limits.redis_wire import Wire, packed, take_over
from gateway.limits.rules import Rule

SCRIPT = files("gateway.limits").joinpath("limits.lua").read_text()
CONNECT_S = 1.0

T = TypeVar("T")

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

    One list after another goes over a connection of its own, which is connected when it has to be. A cluster
    is the client library's business alone.
    """

    def __init__(self, url: str, script: str = SCRIPT) -> None:
        self._script = script.encode()
        self._sha = hashlib.sha1(self._script, usedforsecurity=False).hexdigest().encode()
        self._client, self.is_cluster, self.address = _client(url)
        self._connection: Any = None if self.is_cluster else self._client.connection_pool.make_connection()
        self._wire: Wire | None = None

    async def run(self, operations: Sequence[Operation], within: float) -> list[list[int]]:
        """Each operation's replies; TimeoutError after so many seconds. In a cluster each tag's operations
        are one call; their order is kept."""
        if self._connection is None:
            return await _limited(self._run_by_tag(operations), within)
        ends_at = asyncio.get_running_loop().time() + within
        wire = self._wire
        if wire is None or wire.closed:
            wire = self._wire = await _limited(self._connect(), within)
        words = _words(operations)
        try:
            answer = await wire.ask(packed([b"EVALSHA", self._sha, *words]), ends_at)
        except NoScriptError:
            answer = await wire.ask(packed([b"EVAL", self._script, *words]), ends_at)
        return _replies(operations, answer)

    async def probe(self, key: str, within: float) -> None:
        """Raises unless this key's server runs the script and takes writes, over the way that operations
        go: another connection may be let in where theirs isn't, or have been before."""
        await self.run([Operation([key], "hold 1000000 1 probe", 1)], within)

    def hang_up(self) -> None:
        """The next list goes over a new connection."""
        if self._wire is not None:
            self._wire.close()

    async def execute(self, *words: Any) -> Any:
        """A command outside the script."""
        return await self._client.execute_command(*words)

    async def aclose(self) -> None:
        if self._connection is not None:
            await self._connection.disconnect()
        await self._client.aclose()

    async def _connect(self) -> Wire:
        await self._connection.disconnect(nowait=True)  # what the wire is done with
        await self._connection.connect()
        return take_over(self._connection._writer)  # there is no public way to it

    async def _run_by_tag(self, operations: Sequence[Operation]) -> list[list[int]]:
        tagged: dict[str, list[int]] = {}
        for index, operation in enumerate(operations):
            tagged.setdefault(slot_tag(operation.keys[0]), []).append(index)
        calls = [self._call([operations[index] for index in part]) for part in tagged.values()]
        answers: list[list[int]] = [[] for _ in operations]
        for part, replies in zip(tagged.values(), await asyncio.gather(*calls), strict=True):
            for index, reply in zip(part, replies, strict=True):
                answers[index] = reply
        return answers

    async def _call(self, operations: Sequence[Operation]) -> list[list[int]]:
        words = _words(operations)
        try:
            answer = await self._client.execute_command("EVALSHA", self._sha, *words)
        except NoScriptError:
            answer = await self._client.execute_command("EVAL", self._script, *words)
        return _replies(operations, answer)


def _words(operations: Sequence[Operation]) -> list[bytes]:
    """What follows the script: the number of keys, the keys, the list."""
    keys = [key.encode() for operation in operations for key in operation.keys]
    return [b"%d" % len(keys), *keys, " ".join([operation.text for operation in operations]).encode()]


def _replies(operations: Sequence[Operation], answer: bytes) -> list[list[int]]:
    """The script's answer, by operation."""
    numbers = list(map(int, answer.split()))
    replies, start = [], 0
    for operation in operations:
        replies.append(numbers[start : start + operation.replies])
        start += operation.replies
    if start != len(numbers):
        raise InvalidResponse("an answer to something else")
    return replies


async def _limited(call: Coroutine[Any, Any, T], within: float) -> T:
    # Not asyncio.timeout: after the gateway was held up itself, that cancels a call that is answered.
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait((task,), timeout=within)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()


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
