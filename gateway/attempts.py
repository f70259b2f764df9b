"""From a request that may run to a worker that takes it.

A request is repeated while no worker can have begun on it: the connection was refused or found dead, or the
worker refused it. It is repeated once, on another worker, when its own was lost before the first byte of the
answer: once, as a request that fells workers must not fell all of them. After that byte nothing is repeated.
"""

from __future__ import annotations

import asyncio
import math
import time
from urllib.parse import quote

from contracts.errors import ApiError
from contracts.headers import DRAINING, LATE, PATIENCE, PRIORITY, QUEUE_FULL, REQUEST_ID
from gateway import errors
from gateway.accounting import Bill
from gateway.call import Call
from gateway.connection import UpstreamError
from gateway.identity.identity import Identity
from gateway.inbound import Inbound
from gateway.queue import CLASSES
from gateway.relay import failure_of, relay
from gateway.targets import Backend
from gateway.usage.record import MAX_BODY

MAX_ATTEMPTS = 4  # without refusals of workers that drain: all of a version may do that at once
CLIENT_LEFT = 499  # status in metrics; nobody is there to read it
METERED = (  # their tokens are written down
    *(b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/embeddings"),
    *(b"/generate", b"/generate_stream"),
)

_REQUEST_ID = REQUEST_ID.encode()
_DRAINING = DRAINING.encode()
_QUEUE_FULL = QUEUE_FULL.encode()
_LATE = LATE.encode()
_CLASS = {name: f"{PRIORITY}: {name}\r\n".encode() for name in CLASSES}


class _StaleConnection(Exception):
    """A kept-alive connection was dead before the request reached anybody."""


async def serve(call: Call, inbound: Inbound, who: Identity) -> None:
    """Answers the request, or raises ApiError before an answer has begun. Ends when the client leaves."""
    call.ready = time.perf_counter()
    call.who = who
    means = call.means
    recorder = means.recorder
    if recorder is not None and recorder.with_bodies:
        call.body = inbound.body[:MAX_BODY]
    model = means.router.resolve(inbound.model)
    who.require(inbound.model, model)
    call.model, call.weight = model, inbound.sequences
    if inbound.model_in_query:
        call.path += b"?model=" + quote(inbound.model, safe="").encode()
    call.watch()
    try:
        plan = means.admission.plan(who, model)
        if plan.charges:
            call.granted = await means.admission.admit(plan, call.path, inbound.body)
        if plan.counts_tokens or (recorder is not None and call.route in METERED):
            call.bill = Bill()
        await _try_targets(call, inbound, who)
    except asyncio.CancelledError:
        if not call.client_left:
            raise
        if call.exchange.task is not None:  # the cancellation has done its work: the task goes on to its end
            call.exchange.task.uncancel()
        call.status = CLIENT_LEFT
    finally:
        call.unwatch()


async def _try_targets(call: Call, inbound: Inbound, who: Identity) -> None:
    router = call.means.router
    ends_at = call.exchange.loop.time() + call.means.settings.timeouts.total
    tried: set[str] = set()
    failure: ApiError | None = None
    fresh = False
    left = MAX_ATTEMPTS
    while left:
        left -= 1
        if call.bill is not None and not call.repeated:
            call.bill.address = ""  # whoever was tried before hasn't begun
        try:
            backend = router.claim(call.model, who.user, tried, inbound.body, who.priority, call.weight)
            if backend is None:
                backend = await _wait(call, inbound, who, tried)
        except ApiError as error:
            raise (failure or error) from None
        call.backend = backend
        try:
            refused = await _attempt(call, backend, inbound, _CLASS[who.priority], ends_at, fresh)
            if not refused:
                return
            failure = _later(call, failure, _refusal(call, backend, refused))
            if refused == _LATE:
                break
            left += refused == _DRAINING
        except _StaleConnection:
            fresh = True  # the worker had closed it; others to it are likely dead too
            continue
        except UpstreamError as error:
            failure = _later(call, failure, failure_of(call, error))
            if not error.untouched:
                call.means.metrics.ended(backend.labels, good=False)
            if _is_final(call, error):
                raise failure from None
            call.repeated = call.begun
        finally:
            backend.release(who.priority, call.weight)
        tried.add(backend.labels[1])
        router.refresh()  # a worker that refuses has probably been replaced just now
    raise failure or errors.model_unavailable(call.model)


def _is_final(call: Call, error: UpstreamError) -> bool:
    """Whether no other worker may be asked, or none could be."""
    if error.kind == "exhausted":
        return True
    return not error.untouched and (error.kind != "broken" or call.repeated)


def _later(call: Call, failure: ApiError | None, later: ApiError) -> ApiError:
    """What the client hears of two failures: that it was begun, if it was, as a refusal says that nothing
    was done."""
    return failure if call.repeated and failure is not None else later


async def _wait(call: Call, inbound: Inbound, who: Identity, tried: set[str]) -> Backend:
    """A worker, once one has room. ApiError 503 when that would take too long."""
    began = time.perf_counter()
    most = min(call.means.settings.timeouts.first_byte, call.head.patience or math.inf)
    within = max(0.0, most - (began - call.began))
    try:
        return await call.means.router.wait(
            call.model, who.user, who.priority, within, tried, inbound.body, call.weight
        )
    finally:
        call.waited += time.perf_counter() - began


def _refusal(call: Call, backend: Backend, reason: bytes) -> ApiError:
    """What a client hears if no other worker takes it."""
    if reason == _LATE:
        return errors.overloaded(call.model, "expired", backend.queue.backlog())
    if reason != _QUEUE_FULL:
        return errors.model_unavailable(call.model)
    backend.refused_as_full(call.weight)
    return errors.overloaded(call.model, "full", backend.queue.backlog())


async def _attempt(
    call: Call, backend: Backend, inbound: Inbound, class_line: bytes, ends_at: float, fresh: bool
) -> bytes:
    """Why the worker refused, before it did anything; empty when it answered."""
    means, bill = call.means, call.bill
    upstream, timeouts, address = means.upstream, means.settings.timeouts, backend.target.address
    asked = time.perf_counter()
    connection = None if fresh else upstream.take(address)
    if connection is None:
        connection = await upstream.connect(address, timeouts.connect)
    try:
        # An answer in one piece has its head at the end: only `total` can limit that.
        head_within = timeouts.first_byte if inbound.streams else timeouts.total
        if bill is not None:
            bill.address = address
        head = _request_head(call, class_line, len(inbound.body))
        connection.start(head, inbound.body, timeouts, head_within, ends_at)
        call.begun = True
        try:
            await connection.head()
        except UpstreamError as error:
            if error.untouched:
                call.begun = call.repeated
                if connection.reused:
                    raise _StaleConnection from None
            raise
        call.waited += connection.head_at - asked
        if connection.status == 503 and connection.refused:
            call.begun = call.repeated
            return connection.refused
        if connection.status >= 500:
            backend.health.failed()
        elif not backend.health.clear:
            backend.health.succeeded()
        if bill is not None:
            bill.answered(connection.usage)
        good = await relay(call, connection)
        means.metrics.ended(backend.labels, good)
        return b""
    finally:
        upstream.give_back(connection)


def _request_head(call: Call, class_line: bytes, length: int) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: worker\r\n%b%b%b%b%b: %b\r\ncontent-length: %d\r\n\r\n" % (
        call.path,
        call.head.forwarded,
        b"" if call.head.patience is None else _patience_line(call, call.head.patience),
        class_line,
        b"" if call.bill is None else call.bill.line,
        _REQUEST_ID,
        call.head.request_id,
        length,
    )


def _patience_line(call: Call, seconds: float) -> bytes:
    """What is left of the client's patience; not nothing, which would mean no bound."""
    left = max(0.001, seconds - (time.perf_counter() - call.began))
    return b"%b: %.3f\r\n" % (PATIENCE.encode(), left)
