"""What one version of the routes comes to: who may get requests, who has how many, and whose users are whose.

Targets of one `variant` are replicas: they answer alike. Between variants (a rollout) users are split by hash
and weight.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.headers import SERVED_MODEL, SERVED_TARGET
from gateway import affinity
from gateway.fleet.state import FULL_WEIGHT, Routes, RoutesFile, Target
from gateway.health import Health
from gateway.queue import CLASSES, LEVELS, Priority, Queue
from gateway.upstream import parse_address

NO_LIMIT = sys.maxsize


@dataclass(eq=False, slots=True)
class Backend:
    """A target and the requests on it. Lives as long as the target is in the table or has requests.

    `load`: what they weigh, `by_class` that of each class; `limit`: most of a class and of more urgent ones
    that this gateway may have on it, so that batch work keeps no interactive request from the worker; without
    bound until that has said what it can take.
    """

    model: str
    target: Target
    health: Health
    queue: Queue[Backend]
    inflight: int = 0
    load: int = 0
    by_class: list[int] = field(default_factory=lambda: [0] * len(CLASSES))
    limit: int = NO_LIMIT
    labels: tuple[str, str] = field(init=False)  # model and target
    lines: bytes = field(init=False)  # headers that tell a client who served it
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.labels = (self.model, self.target.id)
        self.lines = b"%b: %b\r\n%b: %b\r\n" % (
            SERVED_MODEL.encode(),
            self.model.encode("latin-1", "replace"),
            SERVED_TARGET.encode(),
            self.target.id.encode("latin-1", "replace"),
        )
        self.seed = affinity.seed_of(self.target.slot)

    def refused_as_full(self, weight: int = 1) -> None:
        """It has all that it can take, until it says something else. `weight`: of what it refused."""
        self.limit = max(1, self.load - weight)

    def has_room(self, level: int) -> bool:
        """For a request of the class CLASSES[level], of any weight: a heavy one would else wait for ever
        while light ones pass by."""
        return self.load < self.limit or sum(self.by_class[: level + 1]) < self.limit

    def claim(self, level: int, weight: int) -> None:
        """Counts a request of the class CLASSES[level]."""
        self.inflight += 1
        self.load += weight
        self.by_class[level] += weight

    def release(self, priority: Priority = "normal", weight: int = 1) -> None:
        """Uncounts a claim of that class."""
        self.inflight -= 1
        self.load -= weight
        self.by_class[LEVELS[priority]] -= weight
        if self.queue.waiting:
            self.queue.slot_freed()


# Replicas of each variant, with the basis point at which its share of the users ends.
Shares = tuple[tuple[int, Sequence[Backend]], ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the table. `live`: ready targets with a weight, in the document's order; `shares`: their
    variants' ones, if there are several; `held`: there are none, and requests are to wait for one."""

    routes: Routes
    live: tuple[Backend, ...]
    shares: Shares
    held: bool


class Table:
    """Everything decided by one version of the routes file. `make`: a backend for a target that is new."""

    def __init__(
        self,
        file: RoutesFile,
        backends: Mapping[tuple[str, str], Backend],
        make: Callable[[str, Target], Backend],
    ) -> None:
        self.epoch = file.epoch
        self.backends: dict[tuple[str, str], Backend] = {}
        self.entries: dict[str, Entry] = {}
        self.names: dict[str, str] = {}
        for model, routes in file.models.items():
            live = []
            for target in routes.targets:
                parse_address(target.address)
                if target.weight_bp < 0:
                    raise ValueError(f"weight_bp of {target.id} is negative")
                key = (model, target.id)
                backend = backends.get(key) or make(model, target)
                backend.target = target
                self.backends[key] = backend
                if target.state == "ready" and target.weight_bp > 0:
                    live.append(backend)
            split = len({backend.target.variant for backend in live}) > 1
            shares = shares_of(live) if split else ()
            self.entries[model] = Entry(routes, tuple(live), shares, routes.hold and not live)
        found = list(self.found())
        for model, entry in found:
            for alias in entry.routes.aliases:
                self.names.setdefault(alias, model)
        self.names.update((model, model) for model, _ in found)
        for key, backend in backends.items():
            if backend.inflight:
                self.backends.setdefault(key, backend)

    def found(self) -> Iterator[tuple[str, Entry]]:
        """The models that requests find, by name."""
        return ((model, entry) for model, entry in self.entries.items() if not entry.routes.retired)

    @property
    def addresses(self) -> set[str]:
        return {backend.target.address for backend in self.backends.values()}

    @property
    def ready(self) -> Iterator[Backend]:
        """All that get requests, or may any time now."""
        for model, entry in self.entries.items():
            for target in entry.routes.targets:
                if target.state == "ready":
                    yield self.backends[model, target.id]


def shares_of(live: Sequence[Backend]) -> Shares:
    """A variant's share is the sum of its replicas' weights, of all weights.

    Shares are laid out from the document's last variant on: the standby comes last in it and owns
    [0, weight), so raising its weight only moves users forward. The share of a target that isn't among `live`
    is filled by the others in proportion.
    """
    total = sum(backend.target.weight_bp for backend in live)
    variants: dict[str, list[Backend]] = {}
    for backend in live:
        variants.setdefault(backend.target.variant, []).append(backend)
    edge, shares = 0, []
    for replicas in reversed(variants.values()):
        edge += sum(backend.target.weight_bp for backend in replicas)
        shares.append((-(-edge * FULL_WEIGHT // total), replicas))
    return tuple(shares)


def sticky(shares: Shares, salt: str, model: str, user: str) -> Sequence[Backend]:
    """The replicas that a user gets in a rollout: those into whose share hash(salt, model, user) mod 10000
    falls. A pure function, so all gateways agree."""
    name = f"{salt}|{model}|{user}".encode("utf-8", "surrogatepass")
    bucket = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) % FULL_WEIGHT
    for end, replicas in shares:
        if bucket < end:
            return replicas
    return shares[-1][1]
