"""A client's connection to a worker: uvicorn's protocol, with bounds on what comes before a body and on how
slowly that may come."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from contracts import heads
from contracts.errors import ApiError


class BoundedProtocol(HttpToolsProtocol):
    """A request's head has MAX_HEAD bytes and HEAD_SECONDS, and the framing between two pieces of a body as
    many bytes; a body has a least rate. What exceeds that, or is no HTTP, gets an error as everything else
    does, and nothing more is taken."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True  # of the next request, ...
        self._begun = False  # ... which has begun
        self._piece = 0  # bytes that are parsed
        self._unused = 0  # bytes of earlier pieces, since a head was whole or a body moved
        self._moved = False  # a head, or a body, in the piece that is parsed
        self._body_size = 0  # of the pieces that hold it
        self._body_since = 0.0  # loop time since which they are waited for; 0: no body is
        self._problem: ApiError | None = None  # of the head that is parsed
        self._refused = False
        self._looked = False
        self._deadline: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_within(heads.HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._piece, self._moved, self._looked = len(data), False, False
        super().data_received(data)
        self._bound()

    def _bound(self) -> None:
        self._unused = 0 if self._moved else self._unused + self._piece
        if self._refused:
            return
        if self._unused > heads.MAX_HEAD:
            self._refuse(heads.headers_too_large())
        elif not self._in_head:
            self._expect_body()
        elif self._moved and not self._begun:
            self._expect_nothing()
        elif self._deadline is None:
            self._expect_within(heads.HEAD_SECONDS)

    def _expect_body(self) -> None:
        """More of a body must come, and all of it at a rate."""
        self._body_size += self._piece
        if not self._body_since:
            self._body_since = self.loop.time()
            self._expect_within(heads.BODY_SECONDS)

    # --- httptools

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer: it comes when the request has been read already
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        try:
            self._check_head()
        except ApiError as error:
            self._problem = error  # uvicorn doesn't tell send_400_response what was raised
            raise
        self._in_head, self._begun, self._moved = False, False, True
        super().on_headers_complete()

    def _check_head(self) -> None:
        if self._unused + self._piece > heads.MAX_HEAD:  # a part of the piece may be another request's
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > heads.MAX_HEAD:
                raise heads.headers_too_large()
        hosts = sum(name == b"host" for name, _ in self.headers)
        heads.check_hosts(hosts, self.parser.get_http_version())

    def on_body(self, body: bytes) -> None:
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._moved = True, True
        self._body_size, self._body_since = 0, 0.0
        self._expect_nothing()
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: it is answered as HTTP/1.1, and the log isn't for clients to fill."""

    # --- refusals

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._problem or heads.invalid_http())

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        if self._answering:
            if self._in_head or self.pipeline or self.cycle.response_started:
                self.transport.close()  # an answer is on its way: this one can't go into it
                return
            self.cycle.disconnected = True  # the rest of its body never comes
            self.cycle.message_event.set()
        self.transport.write(heads.last_answer(error))
        self.transport.write_eof()
        self._expect_within(heads.LINGER_SECONDS)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- time limits

    def _expect_within(self, seconds: float) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(seconds, self._on_late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_late(self) -> None:
        if self._refused or self.transport.is_closing():
            self.transport.close()
        elif self._body_since:
            self._on_late_body()
        elif self._answering:
            self._expect_within(heads.HEAD_SECONDS)  # what comes behind a request has time until its answer
        elif not self._looked:
            self._looked = True
            self._expect_within(heads.LAST_LOOK_SECONDS)
        elif self._begun:
            self._refuse(heads.request_timeout(heads.HEAD_SECONDS))
        else:
            self.transport.close()

    def _on_late_body(self) -> None:
        """Called at times in the course of a body: is it late by now?"""
        now = self.loop.time()
        if (
            self.pipeline or self.flow.read_paused
        ):  # what is missing isn't the client's fault, or nobody's loss
            self._body_since, self._body_size = now, 0
        left = heads.body_deadline(self._body_since, self._body_size) - now
        if left > 0:
            self._expect_within(left)
        else:
            self._refuse(heads.body_too_slow())
