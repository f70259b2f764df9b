"""The way to Redis: its URL, one script, and nothing of the password in what others see."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec
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
# Each operation's replies, or why there are none.
Done = Callable[[list[list[int]] | BaseException], None]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int]).decode

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
    """An entry of `limits.lua`'s list, in its words; who waits for it; what leases and rules it is about."""

    keys: list[str]
    words: list[Any]
    replies: int
    leases: list[str] = field(default_factory=list)
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
        self._slow: asyncio.Task[None] | None = None  # what can't be written at once

    def send(self, operations: Sequence[Operation], within: float, done: Done) -> None:
        """`done` is called once, perhaps before this returns; with TimeoutError after so many seconds. One
        list at a time. In a cluster each tag's operations are one call; their order is kept."""
        wire, ends_at = self._wire, asyncio.get_running_loop().time() + within
        if self.is_cluster:
            self._slow = asyncio.create_task(_tell(partial(self._run_by_tag, operations), within, done))
        elif wire is not None and not wire.closed:
            self._write(wire, operations, ends_at, done)
        else:

            def connected(outcome: Wire | BaseException) -> None:
                if isinstance(outcome, BaseException):
                    done(outcome)
                else:
                    self._wire = outcome
                    self._write(outcome, operations, ends_at, done)

            self._slow = asyncio.create_task(_tell(self._connect, within, connected))

    async def run(self, operations: Sequence[Operation], within: float) -> list[list[int]]:
        """`send`, for one who waits."""
        answer: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()

        def done(outcome: list[list[int]] | BaseException) -> None:
            if answer.done():
                return
            if isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        self.send(operations, within, done)
        return await answer

    def _write(self, wire: Wire, operations: Sequence[Operation], ends_at: float, done: Done) -> None:
        words = _words(operations)

        def answered(answer: bytes | Exception) -> None:
            if isinstance(answer, NoScriptError):
                wire.ask(packed([b"EVAL", self._script, *words]), ends_at, read)
            else:
                read(answer)

        def read(answer: bytes | Exception) -> None:
            done(answer if isinstance(answer, Exception) else _replies(operations, answer))

        wire.ask(packed([b"EVALSHA", self._sha, *words]), ends_at, answered)

    async def probe(self, key: str, within: float) -> None:
        """Raises unless this key's server runs the script and takes writes, over the way that operations
        go: another connection may be let in where theirs isn't, or have been before."""
        await self.run([Operation([key], ["hold", key, 1_000_000, 1, "probe"], 1)], within)

    def hang_up(self) -> None:
        """The next list goes over a new connection."""
        if self._wire is not None:
            self._wire.close()

    async def execute(self, *words: Any) -> Any:
        """A command outside the script."""
        return await self._client.execute_command(*words)

    async def aclose(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
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
        replies = _replies(operations, answer)
        if isinstance(replies, Exception):
            raise replies
        return replies


def _words(operations: Sequence[Operation]) -> list[bytes]:
    """What follows the script: the number of keys, the keys, the list."""
    keys = dict.fromkeys([key for operation in operations for key in operation.keys])
    words: list[str | int] = []
    for operation in operations:
        words += operation.words
    return [b"%d" % len(keys), *[key.encode() for key in keys], _encode(words)]


def _replies(operations: Sequence[Operation], answer: bytes) -> list[list[int]] | InvalidResponse:
    """The script's answer, by operation."""
    try:
        numbers = _decode(answer)
    except msgspec.MsgspecError:
        return InvalidResponse("no list of numbers")
    replies, start = [], 0
    for operation in operations:
        replies.append(numbers[start : start + operation.replies])
        start += operation.replies
    return replies if start == len(numbers) else InvalidResponse("an answer to something else")


async def _limited(call: Callable[[], Coroutine[Any, Any, T]], within: float) -> T:
    # Not asyncio.timeout: after the gateway was held up itself, that cancels a call that is answered.
    task = asyncio.create_task(call())
    try:
        await asyncio.wait((task,), timeout=within)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()


async def _tell(
    call: Callable[[], Coroutine[Any, Any, T]], within: float, done: Callable[[T | BaseException], None]
) -> None:
    """`done` gets what it returns or raises. It is called here: a task that is cancelled before its first
    turn would leave a coroutine that nobody ever awaits."""
    outcome: T | BaseException
    try:
        outcome = await _limited(call, within)
    except BaseException as error:
        done(error)
        if not isinstance(error, Exception):
            raise
    else:
        done(outcome)


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
