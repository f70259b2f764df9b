"""`pagefleet cache`"""

from __future__ import annotations

import click
import httpx

from gateway.cli.common import fail, print_json, require_fleet, which_fleet
from gateway.fleet.errors import EXIT_INVALID, no_such_model
from gateway.fleet.state import Target, read_routes
from gateway.fleet.statedir import StateDir

_ANSWER_WITHIN = 30.0  # seconds; it waits for the step that the engine is in


@click.group()
def cache() -> None:
    """What workers keep of prompts that they have computed."""


@cache.command()
@click.argument("model")
@which_fleet("-f", "--file")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def reset(model: str, state: StateDir, as_json: bool) -> None:
    """Make all workers of a model (by any of its names) forget their cached prompts; answers under way go
    on."""
    require_fleet(state)
    targets = _targets(state, model)
    problems = {target.id: _reset(target) for target in targets}
    if as_json:
        print_json({name: {"reset": problem is None, "error": problem} for name, problem in problems.items()})
    else:
        for name, problem in problems.items():
            click.echo(f"{name}: {problem or 'reset'}", err=problem is not None)
    if any(problem is not None for problem in problems.values()):
        fail(f"not all workers of {model} have forgotten their cached prompts")


def _targets(state: StateDir, name: str) -> list[Target]:
    """The model's workers that have begun to serve; the end of the command when there is no such model."""
    try:
        models = read_routes(state.routes).models
    except (OSError, ValueError) as error:
        fail(f"{state.routes} can't be read: {error}")
    for routes in models.values():
        if name in (routes.model, *routes.aliases):
            return [target for target in routes.targets if target.state in ("ready", "draining")]
    known = (known for routes in models.values() for known in (routes.model, *routes.aliases))
    fail(no_such_model(name, known), EXIT_INVALID)


def _reset(target: Target) -> str | None:
    """Why the worker has not, None when it has."""
    uds = target.address.removeprefix("unix:")
    local = uds != target.address
    transport = httpx.HTTPTransport(uds=uds if local else None, verify=False)
    base = "http://worker" if local else target.address
    try:
        with httpx.Client(transport=transport, base_url=base, timeout=_ANSWER_WITHIN) as client:
            response = client.post("/admin/reset_prefix_cache")
    except (httpx.HTTPError, OSError) as error:
        return f"no answer: {str(error) or type(error).__name__}"
    return None if response.status_code == 200 else f"refused with HTTP {response.status_code}"
