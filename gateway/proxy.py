"""Bytes in, bytes out: one request to a worker and its answer back.

A request is repeated while no worker can have begun on it: the connection was refused or found dead, or the
worker refused it. It is repeated once, on another worker, when its own was lost before the first byte of the
answer: once, as a request that fells workers must not fell all of them. After that byte nothing is repeated.
A client that leaves cancels the exchange at any point, which closes the worker's connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Protocol
from urllib.parse import quote

from contracts.errors import ApiError
from contracts.headers import DRAINING, PRIORITY, QUEUE_FULL, REQUEST_ID
from contracts.usage import Usage
from gateway import errors
from gateway.accounting import Bill, UsageCollector
from gateway.admission import Admission, limit_lines
from gateway.asgi import Message, Receive, Scope, Send
from gateway.connection import Connection, Timeouts, UpstreamError
from gateway.exchange import Exchange
from gateway.identity.authenticator import Authenticator
from gateway.identity.errors import KeysStale
from gateway.identity.identity import Identity
from gateway.identity.proxies import peer_of
from gateway.inbound import ClientGone, Head, Inbound, parse_body, patience, read_body, read_head
from gateway.limits import Granted
from gateway.metrics import Metrics
from gateway.queue import CLASSES
from gateway.routing import Router
from gateway.targets import Backend
from gateway.tracing import Trace, Tracer
from gateway.upstream import Upstream
from gateway.usage.record import MAX_BODY, Record
from gateway.usage.recorder import Recorder

MAX_ATTEMPTS = 4  # without refusals of workers that drain: all of a version may do that at once
CLIENT_LEFT = 499  # status in metrics; nobody is there to read it
GENERATING = (b"/v1/chat/completions", b"/v1/completions", b"/generate", b"/generate_stream")
LINGER_BYTES = 8 * 1024**2
LINGER_SECONDS = 2.0

_REQUEST_ID = REQUEST_ID.encode()
_DRAINING = DRAINING.encode()
_QUEUE_FULL = QUEUE_FULL.encode()
_CLASS = {name: f"{PRIORITY}: {name}\r\n".encode() for name in CLASSES}

log = logging.getLogger(__name__)


class ProxySettings(Protocol):
    """The part of the gateway's settings that the proxy reads."""

    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def max_body(self) -> int: ...


class Proxy:
    """Forwards POST requests to the workers of the models they name."""

    def __init__(
        self,
        router: Router,
        upstream: Upstream,
        metrics: Metrics,
        settings: ProxySettings,
        auth: Authenticator,
        admission: Admission,
        usage: UsageCollector,
        recorder: Recorder | None,
        tracer: Tracer | None,
    ) -> None:
        self.router = router
        self.upstream = upstream
        self.metrics = metrics
        self.settings = settings
        self.admission = admission
        self.usage = usage
        self.recorder = recorder
        self._auth = auth
        self._tracer = tracer

    async def forward(self, path: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; `path` is the route's own, never the client's spelling."""
        head = read_head(scope)
        call = _Call(self, path, head, scope["exchange"], send)
        if self._tracer is not None:
            call.trace = self._tracer.begin(head, path.decode())
        if head.trace is not None:
            head.forwarded += head.trace.lines()
        auth, who = self._auth, None
        body_read = False
        try:
            if not auth.needs_body_user:
                try:
                    who = auth.authenticate(scope["headers"], peer_of(scope))
                except KeysStale:
                    who = await auth.authenticate_again(scope["headers"], peer_of(scope))
                call.who = who
            body = await read_body(receive, head, self.settings.max_body)
            body_read = True
            inbound = parse_body(body, scope)
            if who is None:
                who = auth.authenticate(scope["headers"], peer_of(scope), inbound.user)
            await call.run(inbound, who)
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
            call.record()


class _ClientWatch:
    """Cancels the request's task when its client leaves."""

    def __init__(self, exchange: Exchange) -> None:
        self.client_left = False
        self.exchange = exchange
        exchange.on_leave = self._leave
        if exchange.disconnected:
            self._leave()

    def _leave(self) -> None:
        self.client_left = True
        if self.exchange.task is not None:
            self.exchange.task.cancel()

    def forgive(self) -> None:
        """The cancellation has done its work: the task goes on to its end."""
        if self.exchange.task is not None:
            self.exchange.task.uncancel()

    def stop(self) -> None:
        self.exchange.on_leave = None


class _StaleConnection(Exception):
    """A kept-alive connection was dead before the request reached anybody."""


class _Call:
    """One request on its way, with what was decided so far."""

    def __init__(self, proxy: Proxy, path: bytes, head: Head, exchange: Exchange, send: Send) -> None:
        self.proxy = proxy
        self.path = self.route = path
        self.head = head
        self.exchange = exchange
        self.send = send
        self.status = 500
        self.started = False
        self.model = ""
        self.backend: Backend | None = None
        self.at = time.time()
        self.began = self.ready = time.perf_counter()
        self.first: float | None = None  # seconds until the first piece of a good answer
        self.seconds = 0.0
        self.code: str | None = None
        self.who: Identity | None = None
        self.body: bytes | None = None
        self.waited = 0.0  # seconds in which the worker had the word
        self.overhead: float | None = None
        self.granted: Granted | None = None
        self.unserved = False  # refused with 503: nobody has worked on it
        self.bill: Bill | None = None  # when somebody wants to know what it used
        self.watch: _ClientWatch | None = None
        self.trace: Trace | None = None  # when it is sampled
        self.begun = False  # a worker may have worked on it
        self.repeated = False  # it went to a second worker though a first may have begun

    def own_lines(self) -> bytes:
        """The headers of an answer that are the gateway's own."""
        return b"%b: %b\r\n%b%b" % (
            _REQUEST_ID,
            self.head.request_id,
            b"" if self.granted is None else limit_lines(self.granted),
            b"" if self.backend is None else self.backend.lines,
        )

    async def refuse(self, error: ApiError) -> None:
        self.status, self.code = error.status, error.code
        self.unserved = error.status == 503 and not self.begun
        await errors.send_error(self.send, error, lines=self.own_lines())

    def record(self) -> None:
        target = self.backend.target.id if self.backend is not None else ""
        self.seconds = time.perf_counter() - self.began
        self.proxy.metrics.done(self.model, target, self.status, self.seconds, self.overhead)
        if self.trace is not None:
            self.trace.end(self.model, target, self.status, self.overhead)
        if self.granted is not None:
            if self.unserved:
                self.granted.give_back()
            else:
                self.granted.release()
        if self.bill is not None:
            self.proxy.usage.close(self.bill, self._account)
        elif self.proxy.recorder is not None:
            self.proxy.recorder.add(self._record(None))

    def _account(self, usage: Usage | None) -> None:
        """What was used, when it is known; without that, what was reserved stays charged."""
        if self.granted is not None and usage is not None:
            self.granted.settle(usage.total_tokens)
        if self.proxy.recorder is not None:
            self.proxy.recorder.add(self._record(usage))

    def _record(self, usage: Usage | None) -> Record:
        who, backend = self.who, self.backend
        return Record(
            self.at,
            self.seconds,
            self.first,
            self.head.request_id,
            self.route,
            self.status,
            self.code,
            None if who is None else who.user,
            None if who is None else who.key_id,
            self.model,
            "" if backend is None else backend.target.id,
            usage,
            self.body,
        )

    async def run(self, inbound: Inbound, who: Identity) -> None:
        """Serves the request, and cancels itself when the client leaves, whatever it waits for then."""
        self.ready = time.perf_counter()
        self.who = who
        recorder = self.proxy.recorder
        if recorder is not None and recorder.with_bodies:
            self.body = inbound.body[:MAX_BODY]
        model = self.proxy.router.resolve(inbound.model)
        who.require(inbound.model, model)
        self.model = model
        if inbound.model_in_query:
            self.path += b"?model=" + quote(inbound.model, safe="").encode()
        loop = asyncio.get_running_loop()
        watch = self.watch = _ClientWatch(self.exchange)
        try:
            plan = self.proxy.admission.plan(who, model)
            if plan.charges:
                self.granted = await self.proxy.admission.admit(plan, self.path, inbound.body)
            if plan.counts_tokens or (recorder is not None and self.route in GENERATING):
                self.bill = Bill()
            await self._try_targets(inbound, who, loop.time() + self.proxy.settings.timeouts.total)
        except asyncio.CancelledError:
            if not watch.client_left:
                raise
            watch.forgive()
            self.status = CLIENT_LEFT
        finally:
            watch.stop()

    # --- attempts

    async def _try_targets(self, inbound: Inbound, who: Identity, ends_at: float) -> None:
        router = self.proxy.router
        tried: set[str] = set()
        failure: ApiError | None = None
        fresh = False
        left = MAX_ATTEMPTS
        while left:
            left -= 1
            if self.bill is not None and not self.repeated:
                self.bill.address = ""  # whoever was tried before hasn't begun
            try:
                backend = router.claim(self.model, who.user, tried, inbound.body, who.priority)
                if backend is None:
                    backend = await self._wait(inbound, who, tried)
            except ApiError as error:
                raise (failure or error) from None
            self.backend = backend
            try:
                refused = await self._attempt(backend, inbound, _CLASS[who.priority], ends_at, fresh)
                if not refused:
                    return
                failure = self._later(failure, self._refusal(backend, refused))
                left += refused == _DRAINING
            except _StaleConnection:
                fresh = True  # the worker had closed it; others to it are likely dead too
                continue
            except UpstreamError as error:
                failure = self._later(failure, self._failure(error))
                if not error.untouched:
                    self.proxy.metrics.ended(backend.labels, good=False)
                if not error.untouched and (error.kind != "broken" or self.repeated):
                    raise failure from None
                self.repeated = self.begun
            finally:
                backend.release(who.priority)
            tried.add(backend.target.id)
            router.refresh()  # a worker that refuses has probably been replaced just now
        raise failure or errors.model_unavailable(self.model)

    def _later(self, failure: ApiError | None, later: ApiError) -> ApiError:
        """What the client hears of two failures: that it was begun, if it was, as a refusal says that nothing
        was done."""
        return failure if self.repeated and failure is not None else later

    async def _wait(self, inbound: Inbound, who: Identity, tried: set[str]) -> Backend:
        """A worker, once one has room. ApiError 503 when that would take too long."""
        began = time.perf_counter()
        most = patience(self.exchange.scope["headers"], self.proxy.settings.timeouts.first_byte)
        within = max(0.0, most - (began - self.began))
        try:
            return await self.proxy.router.wait(
                self.model, who.user, who.priority, within, tried, inbound.body
            )
        finally:
            self.waited += time.perf_counter() - began

    def _refusal(self, backend: Backend, reason: bytes) -> ApiError:
        """What a client hears if no other worker takes it."""
        if reason != _QUEUE_FULL:
            return errors.model_unavailable(self.model)
        backend.refused_as_full()
        return errors.overloaded(self.model, "full", backend.queue.backlog())

    async def _attempt(
        self, backend: Backend, inbound: Inbound, class_line: bytes, ends_at: float, fresh: bool
    ) -> bytes:
        """Why the worker refused, before it did anything; empty when it answered."""
        upstream, timeouts = self.proxy.upstream, self.proxy.settings.timeouts
        asked = time.perf_counter()
        connection = None if fresh else upstream.take(backend.target.address)
        if connection is None:
            connection = await upstream.connect(backend.target.address, timeouts.connect)
        try:
            # An answer in one piece has its head at the end: only `total` can limit that.
            if self.bill is not None:
                self.bill.address = backend.target.address
            head_within = timeouts.first_byte if inbound.streams else timeouts.total
            connection.start(
                self._request_head(class_line, len(inbound.body)),
                inbound.body,
                timeouts,
                head_within,
                ends_at,
            )
            self.begun = True
            try:
                await connection.head()
            except UpstreamError as error:
                if error.untouched:
                    self.begun = self.repeated
                    if connection.reused:
                        raise _StaleConnection from None
                raise
            self.waited += connection.head_at - asked
            if connection.status == 503 and connection.refused:
                self.begun = self.repeated
                return connection.refused
            if connection.status >= 500:
                backend.health.failed()
            elif not backend.health.clear:
                backend.health.succeeded()
            if self.bill is not None:
                self.bill.answered(connection.usage)
            good = await self._relay(connection)
            self.proxy.metrics.ended(backend.labels, good)
            return b""
        finally:
            upstream.give_back(connection)

    def _request_head(self, class_line: bytes, length: int) -> bytes:
        return b"POST %b HTTP/1.1\r\nhost: worker\r\n%b%b%b%b: %b\r\ncontent-length: %d\r\n\r\n" % (
            self.path,
            self.head.forwarded,
            class_line,
            b"" if self.bill is None else self.bill.line,
            _REQUEST_ID,
            self.head.request_id,
            length,
        )

    def _failure(self, error: UpstreamError) -> ApiError:
        target = self.backend.target.id if self.backend is not None else ""
        if self.backend is not None and error.kind != "timeout":  # slow isn't broken: probes tell
            self.backend.health.failed()
        level = logging.DEBUG if error.untouched else logging.WARNING
        log.log(level, "request %s on %s: %s", self.head.request_id.decode(), target, error)
        if error.untouched:
            return errors.model_unavailable(self.model)
        if error.kind == "timeout":
            return errors.worker_timeout(self.model, str(error))
        if error.kind == "protocol":
            return errors.worker_nonsense(self.model)
        return errors.worker_failed(self.model)

    # --- the answer

    async def _relay(self, connection: Connection) -> bool:
        """Passes the answer on as it comes. From here on a failure can only be said inside the stream.

        Whether it was a good one, or at least a whole one that isn't the worker's failure.
        """
        send = self.send
        self.started = True
        self.status = connection.status
        self.unserved = connection.status == 503
        lines = connection.lines + self.own_lines()
        stream = None
        if connection.content_length is None:
            stream = errors.stream_format(connection.content_type)
        if stream is not None:
            lines += b"x-accel-buffering: no\r\n"
        self.overhead = time.perf_counter() - self.ready - self.waited
        self.exchange.begin(connection.status, lines, connection.content_length)
        if stream is not None and not connection.pending:  # the first token may take long: the head goes now
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        try:
            while True:
                piece = await connection.read()
                if self.first is None and self.status == 200:
                    self.first = time.perf_counter() - self.began
                last = connection.complete and not connection.pending
                await send({"type": "http.response.body", "body": piece, "more_body": not last})
                if last:
                    broken = self.status == 200 and errors.ends_in_error(stream, self.exchange.tail, piece)
                    return self.status < 500 and not broken
                await connection.pass_on(self.exchange.pass_on)
        except UpstreamError as error:
            failure = self._failure(error)
            if error.kind == "broken":
                failure = errors.stream_broken(self.model)
            await self._end_broken(stream, failure)
            return False
        except asyncio.CancelledError:
            if self.watch is None or not self.watch.client_left:  # the gateway stops
                await self._end_broken(stream, errors.shutting_down())
            raise

    async def _end_broken(self, stream: errors.StreamFormat | None, error: ApiError) -> None:
        """A stream ends with an error; any other answer stays short, and the server closes the connection."""
        self.status, self.code = error.status, error.code
        if stream is not None:
            event = errors.error_event(error, stream, self.exchange.tail)
            await self.send({"type": "http.response.body", "body": event, "more_body": False})


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
