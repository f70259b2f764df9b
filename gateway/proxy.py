"""Bytes in, bytes out: requests to workers and their answers back.

Who asks is decided here; `attempts.py` admits the request and finds a worker that takes it, and `relay.py`
passes the answer on. A client that leaves cancels all of it at any point, which closes the worker's
connection.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from contracts.errors import ApiError
from gateway import errors
from gateway.asgi import Message, Receive, Scope, Send
from gateway.attempts import CLIENT_LEFT, serve
from gateway.call import Call, Means
from gateway.identity.authenticator import Authenticator
from gateway.identity.errors import KeysStale
from gateway.identity.proxies import peer_of
from gateway.inbound import ClientGone, Room, check_framing, parse_body, read_head
from gateway.tracing import Tracer

LINGER_BYTES = 8 * 1024**2
LINGER_SECONDS = 2.0


class Proxy:
    """Forwards POST requests to the workers of the models they name."""

    def __init__(self, means: Means, auth: Authenticator, tracer: Tracer | None) -> None:
        self.means = means
        self._auth = auth
        self._tracer = tracer
        self._room = Room(means.metrics.exhausted)

    async def forward(self, path: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; `path` is the route's own, never the client's spelling."""
        head = read_head(scope)
        call = Call(self.means, path, head, scope["exchange"], send)
        if self._tracer is not None:
            call.trace = self._tracer.begin(head, path.decode())
        if head.trace is not None:
            head.forwarded += head.trace.lines()
        auth, who = self._auth, None
        body_read, held = False, b""
        try:
            if not auth.needs_body_user:
                try:
                    who = auth.authenticate(scope["headers"], peer_of(scope))
                except KeysStale:
                    who = await auth.authenticate_again(scope["headers"], peer_of(scope))
                call.who = who
            max_body = self.means.settings.max_body
            check_framing(head, max_body)
            body = call.exchange.whole_body(max_body)
            if body is None:
                body = held = await self._room.read_body(receive, max_body)
            body_read = True
            inbound = parse_body(body, scope)
            if who is None:
                who = auth.authenticate(scope["headers"], peer_of(scope), inbound.user)
            await serve(call, inbound, who)
        except ClientGone:
            call.status = CLIENT_LEFT
        except ApiError as error:
            if body_read:
                await call.refuse(error)
            else:
                call.status, call.code = error.status, error.code
                await _refuse_unread(receive, send, error, call.own_lines())
        except asyncio.CancelledError:
            if not call.started:
                await call.refuse(errors.shutting_down())
            raise
        finally:
            self._room.free(held)
            call.record()


async def _refuse_unread(receive: Receive, send: Send, error: ApiError, lines: bytes) -> None:
    """Answers before the body was read, drops what still comes for a moment, then closes the connection.

    Closing at once would reset it, and a client that is still sending would never see the answer.
    """

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await errors.send_error(send_open, error, [(b"connection", b"close")], lines)
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while dropped < LINGER_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    break
    await send({"type": "http.response.body", "body": b""})
