"""Routes about the worker itself: health, readiness, metrics, identity, and what its operator may do."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from contracts.errors import bad_request, internal_error, model_not_found, not_found, unavailable
from contracts.usage import MAX_IDS
from worker.ipc.client import EngineDead
from worker.ipc.messages import Progress
from worker.server.decoding import decode
from worker.server.exchange import Exchange
from worker.server.schemas import AbortRequest, NamesRequest
from worker.server.state import ServerState, engine_dead

_USAGE_WAIT_SECONDS = 0.5


async def models(state: ServerState, exchange: Exchange) -> None:
    await exchange.json({"object": "list", "data": [_card(state, name) for name in state.names]})


async def model(state: ServerState, exchange: Exchange) -> None:
    name = exchange.path_params["model"]
    if name not in state.names:
        raise model_not_found(name)
    await exchange.json(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    info = state.engine.info if state.engine else None
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "pagefleet",
        "root": state.config.model,
        "max_model_len": info.max_model_len if info else None,
    }


async def health(state: ServerState, exchange: Exchange) -> None:
    """Whether the process is alive and gets on with its work, also while it still loads."""
    engine = state.engine
    if engine is not None and engine.state == "dead":
        raise engine_dead()
    stalled = state.stalled_for()
    limit = state.stall_limit()
    if stalled > limit:
        raise unavailable(
            f"The engine has work and has taken no step for {stalled:.0f} s "
            f"(the limit is {limit:g} s, see stall_limit).",
            "engine_stalled",
        )
    await exchange.json(
        {
            "status": "ok",
            "engine": engine.state if engine else "loading",
            "draining": state.gate.draining,
            "inflight": state.gate.inside,
            "max_num_seqs": engine.info.max_num_seqs if engine is not None and engine.info else None,
        }
    )


async def ready(state: ServerState, exchange: Exchange) -> None:
    """200 once the model answers; until then 503 with the phase of loading, and how far it is."""
    body = _readiness(state)
    if body["status"] == "ready":
        await exchange.json(body)
    else:
        await exchange.json(body, 503, {"retry-after": "1"})


def _readiness(state: ServerState) -> dict[str, Any]:
    """status: loading, ready, draining or failed; done of total is in the phase's own unit."""
    engine, gate = state.engine, state.gate
    status, progress = "ready", Progress("ready", 0, 0)
    if engine is not None and engine.state == "dead":
        status, progress = "failed", Progress("failed", 0, 0)
    elif engine is None or engine.state != "ready" or state.text is None:
        status, progress = "loading", (engine.progress if engine else None) or state.progress
    elif gate.draining:
        status, progress = "draining", Progress("draining", 0, 0)
    body = {
        "status": status,
        "phase": progress.phase,
        "done": progress.done,
        "total": progress.total,
        "model": state.model_name,
        "inflight": gate.inside,
    }
    return body | ({"message": engine.failure} if engine is not None and status == "failed" else {})


async def metrics(state: ServerState, exchange: Exchange) -> None:
    await exchange.respond(state.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


async def show_version(state: ServerState, exchange: Exchange) -> None:
    try:
        number = version("pagefleet")
    except PackageNotFoundError:  # run from a source tree
        number = "unknown"
    await exchange.json({"version": number})


async def whoami(state: ServerState, exchange: Exchange) -> None:
    config = state.config
    await exchange.json(
        {"slot": config.slot, "generation": config.generation, "model": state.model_name, "pid": os.getpid()}
    )


async def usage(state: ServerState, exchange: Exchange) -> None:
    """What requests used, by the names that the gateway gave them, commas between: a list in their order.

    Waits a moment for those that are ending. 404 when none of them is known.
    """
    names = exchange.path_params["names"].split(",")
    if len(names) > MAX_IDS:
        raise bad_request(f"at most {MAX_IDS} requests may be asked about at once, not {len(names)}")
    reports = await state.usage.report(names, _USAGE_WAIT_SECONDS)
    if all(report.state == "unknown" for report in reports):
        raise not_found("None of these requests is known here.", code="usage_unknown")
    await exchange.json(reports)


async def window(state: ServerState, exchange: Exchange) -> None:
    """Times of all requests so far, in buckets: contracts.times.Times."""
    await exchange.json(state.times.times())


async def drain(state: ServerState, exchange: Exchange) -> None:
    """Refuse new requests from now on; says how many are still answered. Can be asked again and again."""
    state.gate.draining = True
    await exchange.json({"draining": True, "inflight": state.gate.inside})


async def undrain(state: ServerState, exchange: Exchange) -> None:
    state.gate.draining = False
    await exchange.json({"draining": False, "inflight": state.gate.inside})


async def abort(state: ServerState, exchange: Exchange) -> None:
    """End requests by id (the answer's id or the x-request-id, whole); without ids, all of them."""
    wanted = decode(exchange.body, AbortRequest).request_ids if exchange.body else None
    aborted = 0
    for generation in list(state.generations):
        if wanted is None or not generation.names.isdisjoint(wanted):
            generation.abort(unavailable("The request was aborted by the operator.", "request_aborted"))
            aborted += 1
    await exchange.json({"aborted": aborted})


async def names(state: ServerState, exchange: Exchange) -> None:
    """From now on requests may use these names and no others; the first stays what it was."""
    wanted = decode(exchange.body, NamesRequest).names
    if not wanted or wanted[0] != state.model_name:
        raise bad_request(f"names must begin with the model's own, {state.model_name!r}.", "names")
    state.names = tuple(wanted)
    await exchange.json({"names": wanted})


async def reset_prefix_cache(state: ServerState, exchange: Exchange) -> None:
    """Forget all cached prompts, so that the next ones are computed anew."""
    engine, _, _ = state.ready()
    try:
        problem = await engine.call("reset_prefix_cache")
    except EngineDead:
        raise engine_dead() from None
    if problem:
        raise internal_error(f"The prefix cache was not reset: {problem}", "engine_error")
    await exchange.json({"reset": True})
