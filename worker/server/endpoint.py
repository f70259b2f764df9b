"""Endpoint: the ASGI application of one path. Errors become bodies, a client that leaves ends its work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Receive, Scope, Send

from contracts.errors import ApiError, bad_request, internal_error
from worker.server.body import check_contents
from worker.server.exchange import ClientGone, Exchange
from worker.server.refusals import route_not_found
from worker.server.state import ServerState

log = logging.getLogger("pagefleet.worker")

CLIENT_LEFT = 499  # status in traces; nobody is there to read it

Handler = Callable[[ServerState, Exchange], Awaitable[None]]


class Endpoint:
    """Handlers of one path by method.

    `gated` paths do a model's work: refused while draining, counted until their answer is complete.
    `local` paths are for the machine's own operators: loopback or Unix socket only.
    """

    def __init__(
        self,
        state: ServerState,
        handlers: Mapping[str, Handler],
        *,
        gated: bool = False,
        local: bool = False,
    ) -> None:
        self._state = state
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]
        self._gated = gated
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._state.model_name)
        # An answer that failed half-way (client gone) must not be continued, so nothing is sent from here.
        try:
            with contextlib.suppress(ClientGone):
                await _answered(exchange, self._route(exchange))
        finally:
            if exchange.trace is not None:
                exchange.trace.end(exchange.status if exchange.complete else CLIENT_LEFT)

    async def _route(self, exchange: Exchange) -> None:
        method = exchange.scope["method"]
        handler = self._handlers.get(method)
        if handler is None:
            allowed = ", ".join(sorted(self._handlers))
            raise ApiError(
                405,
                f"This path takes {allowed}, not {method}.",
                code="method_not_allowed",
                headers={"allow": allowed},
            )
        # A page in a browser on this machine may not run the worker: browsers name it in Origin.
        if self._local and (not exchange.is_local or exchange.header("origin") is not None):
            raise route_not_found()
        if method != "POST":
            await handler(self._state, exchange)
            return
        if self._gated:
            self._state.gate.check()
            if self._state.tracer is not None:
                exchange.trace = self._state.tracer.begin(exchange)
        if exchange.usage_name is None or not self._gated:
            await self._work(exchange, handler)
            return
        self._state.usage.begin(exchange.usage_name, exchange.account)
        try:
            await self._work(exchange, handler)
        finally:
            self._state.usage.end(exchange.usage_name, exchange.account)

    async def _work(self, exchange: Exchange, handler: Handler) -> None:
        await exchange.read_body(self._state.config.max_body)
        if not self._gated:
            await self._handle(exchange, handler)
            return
        with self._state.gate:
            await _until_gone(exchange, self._handle(exchange, handler))

    async def _handle(self, exchange: Exchange, handler: Handler) -> None:
        await check_contents(exchange.body)
        await handler(self._state, exchange)


async def _until_gone(exchange: Exchange, work: Awaitable[None]) -> None:
    """Do `work` unless the client leaves first; then it is cancelled, which aborts what it started."""
    working = asyncio.ensure_future(_answered(exchange, work))
    gone = asyncio.ensure_future(exchange.wait_gone())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if exchange.complete:
            await working
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _answered(exchange: Exchange, work: Awaitable[None]) -> None:
    """Await `work`; an exception becomes the answer."""
    try:
        await work
    except ApiError as error:
        await exchange.fail(error)
    except ClientGone:
        raise
    except RecursionError:  # nothing here descends further than what a client sent does
        await exchange.fail(bad_request("The request body is nested too deeply.", code="invalid_json"))
    except Exception as error:
        # Not the exception's text: it may quote a prompt.
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("%s in %s\n%s", type(error).__name__, exchange.scope["path"], where)
        await exchange.fail(internal_error("The server failed on this request; its log says where."))
