"""One client's request on its way: what was decided so far, and what is written down of it in the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from contracts.errors import ApiError
from contracts.headers import REQUEST_ID
from contracts.usage import Usage
from gateway import errors
from gateway.accounting import Bill, UsageCollector
from gateway.admission import Admission, limit_lines
from gateway.asgi import Send
from gateway.connection import Timeouts
from gateway.exchange import Exchange
from gateway.identity.identity import Identity
from gateway.inbound import Head
from gateway.limits import Granted
from gateway.metrics import Metrics
from gateway.routing import Router
from gateway.targets import Backend
from gateway.tracing import Trace
from gateway.upstream import Upstream
from gateway.usage.record import Record
from gateway.usage.recorder import Recorder

_REQUEST_ID = REQUEST_ID.encode()


class ProxySettings(Protocol):
    """The part of the gateway's settings that requests need."""

    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def max_body(self) -> int: ...


@dataclass(slots=True)
class Means:
    """What a gateway serves requests with."""

    router: Router
    upstream: Upstream
    metrics: Metrics
    settings: ProxySettings
    admission: Admission
    usage: UsageCollector
    recorder: Recorder | None


class Call:
    """One request. What is said at first holds until it is decided otherwise."""

    __slots__ = (
        "at", "backend", "began", "begun", "bill", "body", "client_left", "code", "exchange", "first",
        "granted", "head", "means", "model", "overhead", "path", "ready", "repeated", "route", "seconds",
        "send", "started", "status", "trace", "unserved", "waited", "weight", "who",
    )  # fmt: skip

    def __init__(self, means: Means, path: bytes, head: Head, exchange: Exchange, send: Send) -> None:
        self.means = means
        self.path = self.route = path
        self.head = head
        self.exchange = exchange
        self.send = send
        self.at = time.time()
        self.began = self.ready = time.perf_counter()
        self.status = 500
        self.code: str | None = None
        self.started = False  # the answer has begun
        self.model = ""
        self.backend: Backend | None = None
        self.who: Identity | None = None
        self.body: bytes | None = None  # its beginning, where it is to be written down
        self.weight = 1  # sequences that a worker computes for it
        self.seconds = 0.0  # until its end
        self.first: float | None = None  # seconds until the first piece of a good answer
        self.waited = 0.0  # seconds in which the worker had the word
        self.overhead: float | None = None
        self.granted: Granted | None = None
        self.bill: Bill | None = None  # when somebody wants to know what it used
        self.trace: Trace | None = None  # when it is sampled
        self.begun = False  # a worker may have worked on it
        self.repeated = False  # it went to a second worker though a first may have begun
        self.unserved = False  # refused with 503: nobody has worked on it
        self.client_left = False

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

    # --- the client may leave

    def watch(self) -> None:
        """From now on the request's task is cancelled when its client leaves, whatever it waits for then."""
        self.exchange.on_leave = self._leave
        if self.exchange.disconnected:
            self._leave()

    def unwatch(self) -> None:
        self.exchange.on_leave = None

    def _leave(self) -> None:
        self.client_left = True
        if self.exchange.task is not None:
            self.exchange.task.cancel()

    # --- once it is over

    def record(self) -> None:
        means = self.means
        target = self.backend.labels[1] if self.backend is not None else ""
        self.seconds = time.perf_counter() - self.began
        means.metrics.done(self.model, target, self.status, self.seconds, self.overhead)
        if self.trace is not None:
            self.trace.end(self.model, target, self.status, self.overhead)
        if self.granted is not None:
            if self.unserved:
                self.granted.give_back()
            else:
                self.granted.release()
        if self.bill is not None:
            if self.bill.usage is not None:
                self._account(self.bill.usage)
            else:
                means.usage.close(self.bill, self._account)
        elif means.recorder is not None:
            means.recorder.add(self._record(None))

    def _account(self, usage: Usage | None) -> None:
        """What was used, when it is known; without that, what was reserved stays charged."""
        if self.granted is not None and usage is not None:
            self.granted.settle(usage.total_tokens)
        if self.means.recorder is not None:
            self.means.recorder.add(self._record(usage))

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
            "" if backend is None else backend.labels[1],
            usage,
            self.body,
        )
