"""Rollouts on the supervisor's admin socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.fleet.driver.asked import StartRequest, SwapError
from gateway.fleet.driver.rollouts import Rollouts
from gateway.fleet.errors import EXIT_CONFLICT, EXIT_DEGRADED, EXIT_FAILED, EXIT_INVALID, EXIT_MISFIT
from gateway.fleet.rollout import Rollout
from gateway.fleet.rollout import events as e
from gateway.fleet.unit import UnitStatus

LONGEST_WAIT = 60.0  # seconds
_STATUS = {EXIT_INVALID: 422, EXIT_MISFIT: 507, EXIT_CONFLICT: 409, EXIT_DEGRADED: 503}

Handler = Callable[[Request], Awaitable[Response]]


class RolloutStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a rollout. `exit_code`: of a command that waits for its end; None while it runs.
    `starting`: the model's processes that aren't ready yet, and how far they are."""

    rollout: Rollout
    exit_code: int | None
    starting: tuple[UnitStatus, ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing was done; `exit_code`: the command line's for it."""

    message: str
    exit_code: int


def rollout_routes(rollouts: Rollouts) -> list[Route]:
    """``POST /rollouts/{model}`` starts one (`?dry_run=1`: only says what it would do), and
    ``POST /rollouts/{model}/pause`` (resume, promote, abort, undo; `promote?full=1`: to the end) commands it.
    ``GET /rollouts``, ``/rollouts/{model}`` (`?revision=N&wait=30`: as soon as it is another one) and
    ``/rollouts/{model}/history`` tell of them; null: there was none."""

    def told(rollout: Rollout) -> RolloutStatus:
        starting = rollouts.starting(rollout.model)
        return RolloutStatus(rollout=rollout, exit_code=rollout.exit_code, starting=starting)

    async def start(request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=StartRequest)
        except (ValueError, RecursionError) as error:
            raise SwapError(f"the request can't be understood: {error}", EXIT_INVALID) from None
        name = request.path_params["model"]
        if request.query_params.get("dry_run") == "1":
            return json_response(await rollouts.plan(name, asked))
        return json_response(told(await rollouts.start(name, asked)), 202)

    async def undo(request: Request) -> Response:
        return json_response(told(await rollouts.undo(request.path_params["model"])), 202)

    def commanded(make: Callable[[Request], e.Command]) -> Handler:
        async def handler(request: Request) -> Response:
            return json_response(told(rollouts.command(request.path_params["model"], make(request))), 202)

        return handler

    async def show(request: Request) -> Response:
        name, query = request.path_params["model"], request.query_params
        if "revision" not in query:
            latest = rollouts.latest(name)
            return json_response(None if latest is None else told(latest))
        try:
            revision, wait = int(query["revision"]), float(query.get("wait", 0))
        except ValueError:
            raise SwapError("revision and wait must be numbers", EXIT_INVALID) from None
        wait = min(wait, LONGEST_WAIT) if wait > 0 else 0.0  # also of NaN
        return json_response(told(await rollouts.wait(name, revision, wait)))

    async def show_all(_: Request) -> Response:
        return json_response([told(rollout) for rollout in rollouts.all()])

    async def history(request: Request) -> Response:
        return json_response(rollouts.history(request.path_params["model"]))

    commands: dict[str, Handler] = {
        "pause": commanded(lambda _: e.Pause()),
        "resume": commanded(lambda _: e.Resume()),
        "promote": commanded(lambda request: e.Promote(full=request.query_params.get("full") == "1")),
        "abort": commanded(lambda _: e.Abort()),
        "undo": undo,
    }

    def unless_it_is_a_name(word: str, handler: Handler, otherwise: Handler) -> Handler:
        """A model's name may end as a command does."""

        async def handle(request: Request) -> Response:
            whole = f"{request.path_params['model']}/{word}"
            if not rollouts.models.has(whole):
                return await handler(request)
            request.path_params["model"] = whole
            return await otherwise(request)

        return refusable(handle)

    model = "/rollouts/{model:path}"
    return [
        Route("/rollouts", refusable(show_all), methods=["GET"]),
        Route(f"{model}/history", unless_it_is_a_name("history", history, show), methods=["GET"]),
        *(
            Route(f"{model}/{name}", unless_it_is_a_name(name, do, start), methods=["POST"])
            for name, do in commands.items()
        ),
        Route(model, refusable(start), methods=["POST"]),
        Route(model, refusable(show), methods=["GET"]),
    ]


def refusable(handler: Handler) -> Handler:
    """Answers a SwapError as `{"error": Failure}`, and so what can't be read or written."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except SwapError as error:
            failure = Failure(message=str(error), exit_code=error.exit_code)
        except OSError as error:
            failure = Failure(message=f"{error.filename}: {error.strerror}", exit_code=EXIT_FAILED)
        return json_response({"error": failure}, _STATUS.get(failure.exit_code, 500))

    return answer


def json_response(body: Any, status: int = 200) -> Response:
    """Whatever msgspec can encode."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
