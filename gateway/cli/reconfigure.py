"""Another fleet file for a fleet that runs: what it would change, and the change as it goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.cli.change_display import News
from gateway.cli.common import ask_supervisor, call_supervisor, count_of, fail, print_json
from gateway.config import FleetFile
from gateway.fleet.admin import FleetStatus
from gateway.fleet.applying_routes import ApplyRequest
from gateway.fleet.commands import Slot, slots_for, slots_of, slugs_of
from gateway.fleet.errors import EXIT_CONFLICT, EXIT_DEGRADED, FleetError
from gateway.fleet.ledger import make_ledger, this_machine
from gateway.fleet.reconcile import Change, Effect, ModelPlan, Plan
from gateway.fleet.rollout import Options
from gateway.fleet.rollout.model import EXIT_ROLLED_BACK
from gateway.fleet.statedir import StateDir
from gateway.fleet.steps import Applying
from gateway.fleet.versions import entry_of

EXIT_DETACHED = 130
_POLL = 0.3
_DEFAULTS = Options()
_HOW: dict[Effect, str] = {
    "live": "while everything runs",
    "gateways": "gateway processes are replaced, one after another",
    "next_start": "for processes that start from now on",
    "replicas": "workers come or go",
    "swap": "by a rollout, as pagefleet swap start",
    "restart": "takes `pagefleet down`, then `up`",
}


def wanted_fleet(fleet: FleetFile, running: FleetStatus) -> FleetFile:
    """The file as it is for the running fleet: where that is, and by which path, has been decided."""
    supervisor = fleet.supervisor.model_copy(update={"state_dir": Path(running.state_dir)})
    return fleet.model_copy(update={"supervisor": supervisor})


def ask_plan(state: StateDir, fleet: FleetFile) -> Plan:
    """What the running fleet would do to get there."""
    return call_supervisor(state, "POST", "/config/plan", Plan, content=_request(fleet))


def dry_run(state: StateDir, fleet: FleetFile, options: Options) -> Plan:
    """The same, or the end of the command with why it would be refused."""
    path, body = "/config/plan?check=1", _request(fleet, options)
    plan = call_supervisor(state, "POST", path, Plan, content=body)
    check_memory(state, fleet, plan)
    return plan


def apply_fleet(
    state: StateDir, fleet: FleetFile, plan: Plan, as_json: bool, options: Options = _DEFAULTS
) -> int:
    """Starts the change and follows it to its end; the exit code. `options`: of rollouts that it takes."""
    removed_first = check_memory(state, fleet, plan)
    body = _request(fleet, options, removed_first)
    applying = call_supervisor(state, "POST", "/config/apply", Applying, content=body)
    try:
        silent = as_json or (plan.empty and len(applying.steps) == 1)
        applying = _follow(state, applying, silent)
    except KeyboardInterrupt:
        click.echo("the change goes on; `pagefleet top` shows the processes", err=True)
        return EXIT_DETACHED
    if as_json:
        print_json(applying)
    elif applying.state == "done" and not silent:
        click.echo("done")
    if applying.state == "done":
        return 0
    return EXIT_ROLLED_BACK if applying.rolled_back else EXIT_DEGRADED


def change_instead(state: StateDir, running: FleetStatus, fleet: FleetFile, file: str, as_json: bool) -> int:
    """`pagefleet up` where the fleet is up: applies the file, unless a model would go; the exit code."""
    wanted = wanted_fleet(fleet, running)
    plan = ask_plan(state, wanted)
    going = plan.by_action("removed")
    if going:
        fail(
            f"a fleet is already up in {state.root}, with {', '.join(going)}, which {file} is without; "
            f"`pagefleet config apply {file}` takes away what it is without; nothing was changed",
            EXIT_CONFLICT,
        )
    if not as_json:
        click.echo(f"a fleet is already up in {state.root}; to bring it to {file}:")
        show_plan(plan)
    return apply_fleet(state, wanted, plan, as_json)


def check_memory(state: StateDir, fleet: FleetFile, plan: Plan) -> bool:
    """Ends the command when the wanted fleet doesn't fit. True when what comes needs the memory of what
    goes."""
    if all(new <= old for old, new in (model.replicas for model in plan.models)):
        return False
    going = set(plan.by_action("removed"))
    gone = [slot for slot in slots_of(_running_fleet(state)) if slot.entry.name in going] if going else []
    there = [*slots_of(fleet), *_standbys(state)]
    try:
        machine = this_machine()
        ledger = make_ledger(fleet, machine, [*there, *gone])
        if ledger.problems and gone:
            ledger = make_ledger(fleet, machine, there)
            if not ledger.problems:
                return True
    except FleetError as error:
        fail(str(error), error.exit_code)
    for refusal in ledger.refusals:
        click.echo(refusal, err=True)
    if ledger.problems:
        fail("nothing was changed", ledger.exit_code)
    return False


def _standbys(state: StateDir) -> list[Slot]:
    """Of rollouts that are under way: they are there as well, though no fleet file tells of them."""
    status = ask_supervisor(state, "GET", "/status")
    under_way = [one for one in status.rollouts if not one.terminal] if status is not None else []
    entries = {entry.name: entry for entry in _running_fleet(state).models} if under_way else {}
    slugs = slugs_of(list(entries.values()))
    return [
        slot
        for one in under_way
        if one.model in entries
        for slot in slots_for(entry_of(entries[one.model], one.new), slugs[one.model], "b")
    ]


def _running_fleet(state: StateDir) -> FleetFile:
    """As the supervisor has written it down."""
    try:
        return FleetFile(**json.loads(state.config.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        fail(f"{state.config} can't be read: {error}")


def _request(fleet: FleetFile, options: Options = _DEFAULTS, removed_first: bool = False) -> bytes:
    """What the file leaves open stays open."""
    asked = ApplyRequest(
        fleet=fleet.model_dump(exclude_unset=True), options=options, removed_first=removed_first
    )
    return msgspec.json.encode(asked, enc_hook=str)


def _follow(state: StateDir, applying: Applying, silent: bool) -> Applying:
    """Until it is over; a line for each step that begins or ends, or gets on."""
    news = News()
    while True:
        for line in () if silent else news.lines(applying):
            click.echo(line)
        if applying.state != "running":
            return applying
        time.sleep(_POLL)
        applying = call_supervisor(state, "GET", "/config/apply", Applying)


def show_plan(plan: Plan) -> None:
    """In words, nothing left out."""
    if plan.empty:
        click.echo("nothing to change")
        return
    for line in plan_lines(plan):
        click.echo(line)


def plan_lines(plan: Plan) -> Iterator[str]:
    for change in plan.fleet:
        yield _change_line(change)
    for model in plan.models:
        yield from _model_lines(model)


def _model_lines(model: ModelPlan) -> Iterator[str]:
    match model.action:
        case "unchanged":
            yield f"{model.name}: unchanged"
        case "added":
            yield f"{model.name}: comes, {count_of(model.replicas[1], 'worker')}"
        case "removed":
            yield f"{model.name}: goes, after its requests have ended"
        case "changed":
            for change in model.changes:
                yield f"{model.name}: {_change_line(change)}"


def _change_line(change: Change) -> str:
    key = change.key.removeprefix("models[].")
    return f"{key}: {_short(change.old)} -> {_short(change.new)} ({_HOW[change.effect]})"


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
