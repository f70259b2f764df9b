"""A worker's answer on its way to the client, and what is said when it breaks off."""

from __future__ import annotations

import asyncio
import logging
import time

from contracts.errors import ApiError
from gateway import errors
from gateway.call import Call
from gateway.connection import Connection, UpstreamError

log = logging.getLogger(__name__)


async def relay(call: Call, connection: Connection) -> bool:
    """Passes the answer on as it comes. From here on a failure can only be said inside the stream.

    Whether it was a good one, or at least a whole one that isn't the worker's failure.
    """
    exchange = call.exchange
    call.started = True
    call.status = connection.status
    call.unserved = connection.status == 503
    lines = connection.lines + call.own_lines()
    stream = None
    if connection.content_length is None:
        stream = errors.stream_format(connection.content_type)
    if stream is not None:
        lines += b"x-accel-buffering: no\r\n"
    call.overhead = time.perf_counter() - call.ready - call.waited
    exchange.begin(connection.status, lines, connection.content_length)
    try:
        if stream is not None and not connection.pending:  # the first token may take long: the head goes now
            await exchange.write(b"", more=True)
        while True:
            piece = connection.at_hand() or await connection.read()
            if call.first is None and call.status == 200:
                call.first = time.perf_counter() - call.began
            last = connection.complete and not connection.pending
            if exchange.held_up:
                await exchange.write(piece, more=not last)
            else:
                exchange.put(piece, more=not last)
            if last:
                broken = call.status == 200 and errors.ends_in_error(stream, exchange.tail, piece)
                return call.status < 500 and not broken
            await connection.pass_on(exchange.pass_on)
    except UpstreamError as error:
        failure = failure_of(call, error)
        if error.kind == "broken":
            failure = errors.stream_broken(call.model)
        await _end_broken(call, stream, failure)
        return False
    except asyncio.CancelledError:
        if not call.client_left:  # the gateway stops
            await _end_broken(call, stream, errors.shutting_down())
        raise


def failure_of(call: Call, error: UpstreamError) -> ApiError:
    """What the client hears of it, and what is held against the worker."""
    backend = call.backend
    target = backend.labels[1] if backend is not None else ""
    level = logging.DEBUG if error.untouched else logging.WARNING
    log.log(level, "request %s on %s: %s", call.head.request_id.decode(), target, error)
    if error.kind == "exhausted":
        call.means.metrics.exhausted()
        return errors.gateway_exhausted()
    if backend is not None and error.kind != "timeout":  # slow isn't broken: probes tell
        backend.health.failed()
    if error.untouched:
        return errors.model_unavailable(call.model)
    if error.kind == "timeout":
        return errors.worker_timeout(call.model, str(error))
    if error.kind == "protocol":
        return errors.worker_nonsense(call.model)
    return errors.worker_failed(call.model)


async def _end_broken(call: Call, stream: errors.StreamFormat | None, error: ApiError) -> None:
    """A stream ends with an error; any other answer stays short, and the server closes the connection."""
    call.status, call.code = error.status, error.code
    if stream is not None:
        await call.exchange.write(errors.error_event(error, stream, call.exchange.tail), more=False)
