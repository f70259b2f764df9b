"""Another fleet file for the running fleet, on the supervisor's admin socket."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.config import FleetFile
from gateway.fleet.applying import Applier
from gateway.fleet.driver.asked import SwapError
from gateway.fleet.driver.routes import json_response, refusable
from gateway.fleet.errors import EXIT_INVALID
from gateway.fleet.rollout import Options


class ApplyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`fleet`: a whole fleet file, checked, with absolute paths; `options`: of rollouts that it takes;
    `removed_first`: what comes needs the memory of what goes."""

    fleet: dict[str, Any]
    options: Options = Options()
    removed_first: bool = False


def applying_routes(applier: Applier) -> list[Route]:
    """``POST /config/plan`` says what an `ApplyRequest` would change (`?check=1`: or why that is refused);
    ``POST /config/apply`` changes it, and ``GET`` of that says how far it is."""

    async def plan(request: Request) -> Response:
        asked = _decoded(await request.body())
        fleet = _fleet(asked)
        if request.query_params.get("check") == "1":
            return json_response(await applier.check(fleet, asked.options))
        return json_response(applier.plan(fleet))

    async def apply(request: Request) -> Response:
        asked = _decoded(await request.body())
        applying = await applier.start(_fleet(asked), asked.options, asked.removed_first)
        return json_response(applying, 202)

    async def show(_: Request) -> Response:
        if applier.latest is None:
            raise SwapError("the fleet hasn't been changed since it came up", EXIT_INVALID)
        return json_response(applier.latest)

    return [
        Route("/config/plan", refusable(plan), methods=["POST"]),
        Route("/config/apply", refusable(apply), methods=["POST"]),
        Route("/config/apply", refusable(show), methods=["GET"]),
    ]


def _decoded(body: bytes) -> ApplyRequest:
    try:
        return msgspec.json.decode(body, type=ApplyRequest)
    except (ValueError, RecursionError) as error:
        raise SwapError(f"the request can't be understood: {error}", EXIT_INVALID) from None


def _fleet(asked: ApplyRequest) -> FleetFile:
    problems = asked.options.problems()
    if problems:
        raise SwapError("; ".join(problems), EXIT_INVALID)
    try:
        return FleetFile(**asked.fleet)
    except (TypeError, ValidationError) as error:
        raise SwapError(f"the fleet file can't be understood: {error}", EXIT_INVALID) from None
