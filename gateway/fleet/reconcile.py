"""What another fleet file means for a fleet that runs: two files in, a plan out, nothing touched.

Each key of the fleet file has one effect, in `EFFECTS`; a key without one is an error here and in the tests,
never silently ignored. The worker options of a model are its workers' command line, so they are one entry:
whatever changes there takes other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from gateway.config import FleetFile
from gateway.settings import ModelEntry

Effect = Literal[
    "live",  # taken over while everything runs
    "gateways",  # gateway processes are replaced, one after another, on the same socket
    "next_start",  # holds for processes that start from now on
    "replicas",  # workers are added or removed
    "swap",  # other worker processes: a rollout
    "restart",  # `pagefleet down`, then `up`
]
Action = Literal["unchanged", "added", "removed", "changed"]

MODEL = "models[]."
EFFECTS: Mapping[str, Effect | None] = {  # None: no effect of its own
    "gateway.host": "restart",
    "gateway.port": "restart",
    "gateway.processes": "restart",
    "gateway.redis_url": "restart",  # half of the gateways would count limits elsewhere
    "gateway.auth": "gateways",
    "gateway.limits.default": "live",
    "gateway.limits.on_redis_error": "gateways",
    "gateway.limits.redis_timeout": "gateways",
    "gateway.timeouts.connect": "live",
    "gateway.timeouts.first_byte": "live",
    "gateway.timeouts.idle": "gateways",  # clients' sockets have it from their first moment
    "gateway.timeouts.total": "live",
    "gateway.health": "gateways",
    "gateway.queue": "gateways",
    "gateway.max_body": "restart",  # workers have it as well, and would refuse what gateways let in
    "gateway.audit": "gateways",
    "gateway.tracing": "restart",  # the same: half of each request's spans
    "gateway.usage": "gateways",
    "gateway.usage_by_hour": "gateways",
    "supervisor.backend": "restart",
    "supervisor.state_dir": "restart",
    "supervisor.start_timeout": "live",
    "supervisor.stall_timeout": "next_start",
    "supervisor.drain_timeout": "next_start",
    "defaults": None,  # models have them as their own
    "models[].name": None,  # which model it is
    "models[].aliases": "live",
    "models[].source": "swap",
    "models[].replicas": "replicas",
    "models[].limits": "live",
    "models[].golden": "live",
    "models[].judge": "live",
    "models[].worker": "swap",
}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One key that differs; its values as JSON has them."""

    key: str
    old: Any
    new: Any
    effect: Effect


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one model. `replicas`: before and after."""

    name: str
    action: Action
    replicas: tuple[int, int]
    changes: tuple[Change, ...] = ()

    def has(self, effect: Effect) -> bool:
        return any(change.effect == effect for change in self.changes)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`fleet`: what changes for gateways and supervisor; `models`: in the new file's order, then those that
    go."""

    fleet: tuple[Change, ...] = ()
    models: tuple[ModelPlan, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.fleet and all(model.action == "unchanged" for model in self.models)

    @property
    def restarts(self) -> tuple[Change, ...]:
        """What only `down` and `up` can do."""
        return tuple(change for change in self.fleet if change.effect == "restart")

    @property
    def replaces_gateways(self) -> bool:
        return any(change.effect == "gateways" for change in self.fleet)

    @property
    def swaps(self) -> tuple[ModelPlan, ...]:
        return tuple(model for model in self.models if model.has("swap"))

    def by_action(self, action: Action) -> tuple[str, ...]:
        return tuple(model.name for model in self.models if model.action == action)


def reconcile(running: FleetFile, wanted: FleetFile, runs: Mapping[str, ModelEntry] = {}) -> Plan:
    """The way from one to the other. `runs`: models of which a rollout has changed source or options, as they
    run; a file that says of those what it said before leaves them alone."""
    before = {entry.name: entry for entry in running.models}
    after = {entry.name: entry for entry in wanted.models}
    models = [_model_plan(before.get(name), entry, runs.get(name)) for name, entry in after.items()]
    models += [
        ModelPlan(name=name, action="removed", replicas=(entry.replicas, 0))
        for name, entry in before.items()
        if name not in after
    ]
    return Plan(fleet=tuple(_differences(running, wanted, "")), models=tuple(models))


def _model_plan(old: ModelEntry | None, new: ModelEntry, runs: ModelEntry | None) -> ModelPlan:
    if old is None:
        return ModelPlan(name=new.name, action="added", replicas=(0, new.replicas))
    if runs is not None and (old.source, old.worker) != (new.source, new.worker):
        old = old.model_copy(update={"source": runs.source, "worker": runs.worker})
    changes = tuple(_differences(old, new, MODEL))
    action: Action = "changed" if changes else "unchanged"
    return ModelPlan(name=new.name, action=action, replicas=(old.replicas, new.replicas), changes=changes)


def _differences(old: BaseModel, new: BaseModel, path: str) -> Iterator[Change]:
    """Of one block, and of those in it."""
    for name in type(new).model_fields:
        key = path + name
        if key == "models":
            continue
        one, other = getattr(old, name), getattr(new, name)
        if key not in EFFECTS:
            yield from _differences(one, other, f"{key}.")
        elif EFFECTS[key] is not None and one != other:
            yield from _leaves(one, other, key, EFFECTS[key])


def _leaves(old: Any, new: Any, key: str, effect: Effect | None) -> Iterator[Change]:
    """Of a block with one effect, each key that differs."""
    assert effect is not None
    if isinstance(old, BaseModel) and type(old) is type(new):
        for name in type(new).model_fields:
            if getattr(old, name) != getattr(new, name):
                yield from _leaves(getattr(old, name), getattr(new, name), f"{key}.{name}", effect)
        return
    yield Change(key=key, old=_plain(old, key), new=_plain(new, key), effect=effect)


def _plain(value: Any, key: str) -> Any:
    """As JSON has it, without a password."""
    if value is not None and key == "gateway.redis_url":
        from gateway.limits.redis_link import hidden  # only where it is used: it takes long to load

        return hidden(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, tuple):
        return [_plain(item, key) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
