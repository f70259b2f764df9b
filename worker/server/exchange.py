"""One HTTP request and its answer over raw ASGI: body in, JSON or a stream out, the client's leaving seen.

Raw because a framework's streaming response doesn't watch `receive()` while it sends, and so goes on
generating for a client that has left.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from contracts.errors import ApiError
from contracts.headers import PATIENCE, PRIORITIES, PRIORITY, REQUEST_ID, SERVED_MODEL, USAGE
from contracts.units import format_bytes
from worker.server.usage import Account

if TYPE_CHECKING:
    from worker.server.tracing import RequestTrace

BODY_IDLE_SECONDS = 60.0  # a client that sends nothing for so long gets 408
SEND_STALL_SECONDS = 300.0  # a client that reads nothing for so long is dropped
MAX_REQUEST_ID = 128

_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class Framing(Protocol):
    """How objects are laid out in a stream."""

    content_type: str

    def frame(self, value: Any) -> bytes: ...

    def end(self) -> bytes:
        """What tells a complete stream from a broken one."""


class EventStream:
    """Server-sent events as OpenAI's clients read them, ended by `[DONE]`."""

    content_type = "text/event-stream; charset=utf-8"

    def frame(self, value: Any) -> bytes:
        return b"data: " + _encode(value) + b"\n\n"

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"


class JsonLines:
    """One JSON object a line; the last object says that it is the last."""

    content_type = "application/x-ndjson"

    def frame(self, value: Any) -> bytes:
        return _encode(value) + b"\n"

    def end(self) -> bytes:
        return b""


class Exchange:
    """A request being answered. `request_id` is the client's own when it sent a usable one, else minted.

    `usage_name`: under which a gateway wants to know what the request used, which `account` counts.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, model_name: str) -> None:
        self.scope = scope
        self.body = b""
        self.status = 0  # of the answer; an error in a stream changes it
        self.started = False
        self.complete = False
        self.trace: RequestTrace | None = None
        self.account = Account()
        self._receive = receive
        self._send = send
        self._model_name = model_name
        self._framing: Framing | None = None
        self.request_id = usable_name(self.header(REQUEST_ID)) or f"req-{uuid.uuid4().hex}"
        self.usage_name = usable_name(self.header(USAGE))

    @property
    def service_class(self) -> int | None:
        """The caller's class (index in PRIORITIES) as a gateway on this machine says; None: nobody does."""
        named = self.header(PRIORITY)
        return PRIORITIES.index(named) if named in PRIORITIES and self.is_local else None

    @property
    def patience(self) -> float | None:
        """Seconds after which the request need not be begun any more; None: the client doesn't say."""
        try:
            seconds = float(self.header(PATIENCE) or "nan")
        except ValueError:
            return None
        return seconds if 0 < seconds < math.inf else None

    @property
    def path_params(self) -> Mapping[str, str]:
        params: Mapping[str, str] = self.scope.get("path_params", {})
        return params

    def header(self, name: str) -> str | None:
        """The first header of that (lower-case) name."""
        wanted = name.encode()
        for key, value in self.scope["headers"]:
            if key == wanted:
                text: str = value.decode("latin-1")
                return text
        return None

    def headers(self, name: str) -> list[bytes]:
        """All headers of that (lower-case) name."""
        wanted = name.encode()
        return [value for key, value in self.scope["headers"] if key == wanted]

    def query(self, name: str) -> str | None:
        values = parse_qs(self.scope["query_string"].decode("latin-1")).get(name)
        return values[0] if values else None

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this machine: a Unix socket has no peer address."""
        client = self.scope.get("client")
        return client is None or client[0] in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "")

    async def read_body(self, limit: int) -> None:
        """Read the whole body into `body`. ApiError 413 over `limit` bytes, 408 when it stops arriving;
        ClientGone when the client left."""
        length = self.header("content-length")
        if length is not None and length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(BODY_IDLE_SECONDS):
                    message = await self._receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"The request body stopped arriving for {BODY_IDLE_SECONDS:.0f} s.",
                    code="request_timeout",
                    headers={"connection": "close"},
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
            if not message.get("more_body", False):
                self.body = b"".join(chunks)
                return

    async def wait_gone(self) -> None:
        """Return when the client has left (or the answer is complete). Needs the body to have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer at once; JSON unless `headers` name another content type."""
        given = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        if self.usage_name is not None and not self.account.running:
            given[USAGE] = self.account.usage().header()
        await self._start(status, given)
        await self._write(body, more=False)

    async def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.respond(_encode(value), status, headers)

    async def start_stream(self, framing: Framing) -> None:
        """Send the headers of a streamed answer."""
        self._framing = framing
        await self._start(
            200,
            {"content-type": framing.content_type, "cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def write(self, *values: Any) -> None:
        """Stream some objects as one write: everything that is ready goes out together.

        Waits while the client's buffers are full; drops a client that reads nothing for SEND_STALL_SECONDS.
        """
        assert self._framing is not None
        await self._write(b"".join(map(self._framing.frame, values)), more=True)

    async def end_stream(self, *values: Any) -> None:
        """Stream the last objects and the mark of a complete stream."""
        assert self._framing is not None
        data = b"".join(map(self._framing.frame, values)) + self._framing.end()
        await self._write(data, more=False)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error: a JSON body, or, once streaming, an error object and no mark of the end."""
        if self.complete:
            return
        if not self.started:
            await self.json(error.body(), error.status, error.headers)
        elif self._framing is not None:
            self.status = error.status
            await self._write(self._framing.frame(error.body()), more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        self.status = status
        named = {**headers, REQUEST_ID: self.request_id, SERVED_MODEL: self._model_name}
        # Names may hold what a header can't carry; percent-encoding would make it another name.
        pairs = [(key.encode(), value.encode("latin-1", "replace")) for key, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, data: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(SEND_STALL_SECONDS):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
        self.complete = not more


def usable_name(value: str | None) -> str | None:
    """An id from outside goes back into a header: visible ASCII of sane length, or it isn't used."""
    if value and len(value) <= MAX_REQUEST_ID and all("!" <= character <= "~" for character in value):
        return value
    return None


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is over the limit of {limit} bytes ({format_bytes(limit)}); send less, or "
        "raise the worker's --max-body (in a fleet: gateway.max_body).",
        code="request_too_large",
        headers={"connection": "close"},  # the rest of the body is not read
    )
