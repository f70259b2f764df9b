"""Where a fleet's processes live, by `supervisor.backend`: with the supervisor, or with systemd."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from gateway.config import FleetFile
from gateway.fleet import launch, listen
from gateway.fleet.backends.base import Backend, Found
from gateway.fleet.backends.local import LocalBackend
from gateway.fleet.backends.systemd import (
    CLOSE_PORT,
    LISTENER_FD,
    Mark,
    SystemdBackend,
    end_units,
    forget,
    read_mark,
)
from gateway.fleet.commands import Slot
from gateway.fleet.errors import FleetError, InvalidFleet
from gateway.fleet.ledger import make_ledger, this_machine
from gateway.fleet.reaper import boot_id, reap
from gateway.fleet.statedir import StateDir, write_private
from gateway.fleet.systemctl import Manager, SystemdError
from gateway.fleet.systemd import check_units, memory_limit

log = logging.getLogger(__name__)


@dataclass
class Predecessors:
    """What an earlier supervisor left: living processes and the last generations, by slot."""

    found: dict[str, Found] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)


class Hosting(Protocol):
    """`parent`: the process whose end ends all others; None: they outlive it. `reaped`: how many processes of
    a crashed predecessor were ended. The gateways' listening socket is `fd` for them; `fds` are inherited."""

    parent: int | None
    reaped: int

    @property
    def url(self) -> str: ...

    @property
    def fd(self) -> int: ...

    @property
    def fds(self) -> tuple[int, ...]: ...

    def open(self, slots: Sequence[str], gateways: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """Claims what can conflict, and makes the state directory ready; InvalidFleet when it can't."""

    def backend(self) -> contextlib.AbstractAsyncContextManager[tuple[Backend, Predecessors]]: ...

    def memory(self, slot: Slot) -> int | None:
        """Bytes that a worker may take of the host's; None: no limit of its own. May take a second."""

    async def close_port(self) -> None:
        """Gives up the listening socket. The gateways still have it: once each has been told to end, new
        connections are refused."""

    def ended(self) -> None:
        """Every process has been stopped, so nothing is left to a successor."""


def hosting_of(fleet: FleetFile, state: StateDir) -> Hosting:
    return (
        SystemdHosting(fleet, state) if fleet.supervisor.backend == "systemd" else LocalHosting(fleet, state)
    )


class LocalHosting:
    """Every process is a child of the supervisor, and ends with it."""

    def __init__(self, fleet: FleetFile, state: StateDir) -> None:
        self.parent: int | None = os.getpid()
        self.reaped = 0
        self.url = ""
        self._fleet = fleet
        self._state = state

    @property
    def fd(self) -> int:
        return self._listener.fileno()

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.fd,)

    @contextlib.contextmanager
    def open(self, slots: Sequence[str], gateways: Sequence[str]) -> Iterator[None]:
        self.reaped = reap(self._state.records) + end_units(self._state)
        self._state.remove_sockets()
        try:
            with self._listen() as self._listener:
                self.url = listen.base_url(self._listener)
                self._state.place_sockets(slots)
                self._state.place_boards(gateways)
                yield
        finally:
            self._state.remove_sockets()
            self._state.remove_boards()

    def _listen(self) -> socket.socket:
        try:
            return listen.bind(self._fleet.gateway.host, self._fleet.gateway.port)
        except InvalidFleet:
            self._state.discard()
            raise

    @contextlib.asynccontextmanager
    async def backend(self) -> AsyncIterator[tuple[Backend, Predecessors]]:
        with LocalBackend(uuid.uuid4().hex, self._state.records) as backend:
            yield backend, Predecessors()

    def memory(self, slot: Slot) -> int | None:
        return None

    async def close_port(self) -> None:
        self._listener.close()

    def ended(self) -> None:
        pass


class SystemdHosting:
    """Every process is a unit of systemd, and so is the gateways' socket: all outlive the supervisor."""

    def __init__(self, fleet: FleetFile, state: StateDir) -> None:
        self.parent: int | None = None
        self.reaped = 0
        self.fd = LISTENER_FD
        self.fds: tuple[int, ...] = ()
        self._fleet = fleet
        self._state = state
        self._manager = Manager.ours()
        self._has_ended = False
        self._limits: dict[bytes, int | None] = {}

    @property
    def url(self) -> str:
        return listen.url_of(self._fleet.gateway.host, self._fleet.gateway.port)

    @contextlib.contextmanager
    def open(self, slots: Sequence[str], gateways: Sequence[str]) -> Iterator[None]:
        self.reaped = reap(self._state.records)
        try:
            check_units(self._fleet, self._state, self._manager)
        except FleetError:
            self._state.discard()
            raise
        self._remove_sockets()
        self._state.place_boards(gateways, afresh=self._is_new_boot())
        mark = Mark(user=self._manager.user, boot_id=boot_id())
        write_private(self._state.systemd, msgspec.json.encode(mark))
        try:
            yield
        finally:
            if self._has_ended:
                forget(self._state, self._manager)
            self._remove_sockets()

    def _is_new_boot(self) -> bool:
        """Signs of life from before it can look young: they are in time since boot."""
        mark = read_mark(self._state)
        return mark is None or mark.boot_id != boot_id()

    def _remove_sockets(self) -> None:
        """All but those that the last process of each slot has, which may live."""
        notes = launch.notes(self._state.run)
        self._state.remove_sockets(keep={f"{slot}.{note.generation}.sock" for slot, note in notes.items()})

    @contextlib.asynccontextmanager
    async def backend(self) -> AsyncIterator[tuple[Backend, Predecessors]]:
        backend = SystemdBackend(self._manager, self._state.run)
        generations = {slot: note.generation for slot, note in launch.notes(self._state.run).items()}
        try:
            yield backend, Predecessors(await backend.find(), generations)
        finally:
            await backend.leave()

    def memory(self, slot: Slot) -> int | None:
        """By the ledger, asked once for each source with its options."""
        key = msgspec.json.encode([slot.entry.source, slot.entry.worker.model_dump()], enc_hook=str)
        if key not in self._limits:
            try:
                (worker,) = make_ledger(self._fleet, this_machine(), [slot]).workers
                self._limits[key] = memory_limit(worker)
            except FleetError:
                return None
        return self._limits[key]

    async def close_port(self) -> None:
        try:
            await self._manager.call(*CLOSE_PORT)
        except SystemdError as error:
            log.error("the port stays open until all has ended: %s", error)

    def ended(self) -> None:
        self._has_ended = True
