"""Processes as units of systemd, which outlive the supervisor and are found again by its successor.

A slot is an instance of a template (``pagefleet-worker@smollm2-0.service``), not a transient unit: what
such a process may do then stands in files that the supervisor can't loosen, and who lets it start these
units (polkit) lets it start nothing else. Its command line comes from a note (`gateway.fleet.launch`).
An instance is a slot and not a generation, so that what an operator sets for one (`systemctl edit`) stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from gateway.fleet import launch
from gateway.fleet.backends.base import ROLES, Found, Role
from gateway.fleet.launch import Note
from gateway.fleet.statedir import StateDir, write_private
from gateway.fleet.systemctl import CALL_SECONDS, Manager, Properties, SystemdError

SOCKET_UNIT = "pagefleet-gateway.socket"
LISTENER_FD = 3  # the first that systemd passes on: the socket unit's
# By itself: the gateways, which need it to start, would have to end before it.
CLOSE_PORT = ("stop", "--job-mode=ignore-dependencies", SOCKET_UNIT)
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5  # seconds; each look is a process of its own
BEGIN_SECONDS = 30.0  # from the start's order to a process
GONE_SECONDS = 30.0  # for systemd to answer, once the process has ended

_STATE = ("ActiveState", "MainPID", "Result", "ExecMainPID", "ExecMainCode", "ExecMainStatus")
_KILLED, _DUMPED = "2", "3"  # CLD_KILLED, CLD_DUMPED
_REASONS = {
    "oom-kill": "was ended for want of memory: its MemoryMax, or the machine's",
    "watchdog": "was ended by systemd: no sign of life for its WatchdogSec",
    "timeout": "was ended by systemd: its start showed no progress, or its end took too long",
    "resources": "could not be started by systemd; its journal says why",
}


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Lies in the state directory of a fleet that systemd runs: whose manager, and since which boot."""

    user: bool
    boot_id: str


def read_mark(state: StateDir) -> Mark | None:
    try:
        return msgspec.json.decode(state.systemd.read_bytes(), type=Mark)
    except (OSError, ValueError, RecursionError):
        return None


def end_units(state: StateDir) -> int:
    """Stops what runs of a fleet whose supervisor is gone, gateways first, and says how much that was.
    SystemdError when systemd doesn't do it."""
    mark = read_mark(state)
    if mark is None:
        return 0
    manager, ended = Manager(mark.user), 0
    manager.call_now(*CLOSE_PORT, patience=CALL_SECONDS)
    slots = launch.notes(state.run)
    for role in ROLES:
        names = [unit_name(role, slot) for slot in slots]
        active = [unit["Id"] for unit in manager.show_now(names, "Id", "MainPID") if unit["MainPID"] != "0"]
        if active:
            manager.call_now("stop", *active)
        ended += len(active)
    forget(state, manager)
    return ended


def forget(state: StateDir, manager: Manager) -> None:
    """Everything has ended: nothing is left to a successor, and nobody waits at a port that nobody serves.
    SystemdError when the port can't be closed."""
    launch.forget(state.run)
    state.remove_boards()
    state.systemd.unlink(missing_ok=True)
    manager.call_now("stop", SOCKET_UNIT, patience=CALL_SECONDS)


def unit_name(role: Role, slot: str) -> str:
    return f"pagefleet-{role}@{slot}.service"


class UnitProcess:
    """The process of a unit: one that `start` begins, or the one that runs there as `pid`."""

    def __init__(
        self, manager: Manager, unit: str, start: Callable[[], Awaitable[None]] | None, pid: int | None = None
    ) -> None:
        self.unit = unit
        self.pid = pid
        self.reason: str | None = None
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._manager = manager
        self._start = start
        self._descriptor: int | None = None
        self._wanted: int | None = None  # a signal that came before the process was there
        self._life = asyncio.create_task(self._live(), name=unit)

    def terminate(self) -> None:
        """Asks the process itself; its own children are its business."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process; systemd ends what else is in its control group then."""
        self._signal(signal.SIGKILL)

    async def stop(self, patience: float) -> bool:
        """Terminates, waits `patience` seconds, then kills. True when it ended by itself."""
        self.terminate()
        done, _ = await asyncio.wait({self.exited}, timeout=patience)
        self.kill()
        await asyncio.wait({self.exited})
        return bool(done)

    async def leave(self) -> None:
        """Looks no longer; the process goes on."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)

    def _signal(self, number: int) -> None:
        if self.exited.done():
            return
        if self._descriptor is None:
            self._wanted = number
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    async def _live(self) -> None:
        code = 1
        try:
            if self._start is not None:
                await self._start()
                self.pid = await self._begin()
            await self._until_gone()
            code = await self._code()
        except SystemdError as error:
            self.reason = f"can't be started: {error}" if self.pid is None else str(error)
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
        if not self.exited.done():
            self.exited.set_result(code)

    async def _begin(self) -> int:
        """The process id, also of one that has ended already."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BEGIN_SECONDS
        pauses = _pauses()
        while True:
            (state,) = await self._manager.show(self.unit, *_STATE)
            pid = int(state["MainPID"]) or int(state["ExecMainPID"])
            if pid:
                return pid
            is_idle = state["ActiveState"] in ("inactive", "failed")
            if (
                state["ActiveState"] == "failed"
                or loop.time() > deadline
                or (is_idle and await self._no_job())
            ):
                await self._clear(state)
                raise SystemdError(f"systemd has not started {self.unit}: {_why(state)}")
            await asyncio.sleep(next(pauses))

    async def _no_job(self) -> bool:
        """Whether nothing is going to start it any more."""
        (job,) = await self._manager.show(self.unit, "Job")
        return not int(job.get("Job") or 0)

    async def _until_gone(self) -> None:
        assert self.pid is not None
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        if self._wanted is not None:
            self._signal(self._wanted)
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._descriptor)

    async def _code(self) -> int:
        """The exit code, once the whole control group is empty. A unit that ended well may be forgotten by
        systemd at once, which reads as 0."""
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        pauses = _pauses()
        while True:
            try:
                (state,) = await self._manager.show(self.unit, *_STATE)
                answered_at = loop.time()
                is_another = int(state["MainPID"]) not in (0, self.pid)  # somebody has restarted the unit
                if is_another or state["ActiveState"] in ("inactive", "failed"):
                    break
            except SystemdError:
                if loop.time() - answered_at > GONE_SECONDS:
                    raise
            await asyncio.sleep(next(pauses))
        if is_another or int(state["ExecMainPID"]) not in (0, self.pid):
            return 0
        self.reason = _REASONS.get(state["Result"])
        await self._clear(state)
        status = int(state["ExecMainStatus"])
        return -status if state["ExecMainCode"] in (_KILLED, _DUMPED) else status

    async def _clear(self, state: Properties) -> None:
        """A failed unit is kept by systemd until somebody has seen it: we have."""
        if state["ActiveState"] == "failed":
            with contextlib.suppress(SystemdError):
                await self._manager.call("reset-failed", self.unit)


class SystemdBackend:
    """Starts processes as units of `manager`. `run`: the fleet's directory of notes, as the units know it."""

    def __init__(self, manager: Manager, run: Path) -> None:
        self._manager = manager
        self._run = run
        self._processes: list[UnitProcess] = []

    async def leave(self) -> None:
        """Looks at nothing any more; the processes go on."""
        await asyncio.gather(*(process.leave() for process in self._processes))

    def spawn(
        self,
        argv: Sequence[str],
        *,
        role: Role,
        slot: str,
        generation: int,
        log: Path,
        fds: Sequence[int] = (),
        memory: Callable[[], int | None] | None = None,
    ) -> UnitProcess:
        """Returns at once; what goes wrong later is the process's `reason` to have ended."""
        note = Note(list(argv), generation, str(log))
        unit = unit_name(role, slot)

        async def start() -> None:
            await self._make_room(unit)
            write_private(launch.path_of(self._run, slot), launch.encode(note))
            limit = await asyncio.to_thread(memory) if memory is not None else None
            if limit is not None:  # else the template's holds
                await self._manager.call("set-property", "--runtime", unit, f"MemoryMax={limit}")
            await self._manager.call("start", "--no-block", unit)

        return self._keep(UnitProcess(self._manager, unit, start))

    async def find(self) -> dict[str, Found]:
        """The living processes of this fleet's units, by slot."""
        found: dict[str, Found] = {}
        for role in ROLES:
            for unit in await self._manager.show(unit_name(role, "*"), "Id", "ActiveState", "MainPID"):
                slot = unit["Id"].partition("@")[2].removesuffix(".service")
                pid = int(unit["MainPID"])
                note = launch.read(launch.path_of(self._run, slot))
                if pid and note is not None:
                    process = self._keep(UnitProcess(self._manager, unit["Id"], None, pid))
                    ready = unit["ActiveState"] == "active"
                    found[slot] = Found(process, role, slot, note.generation, note.argv, ready)
        return found

    async def _make_room(self, unit: str) -> None:
        """Somebody else may have started the unit, which then runs what the slot had before."""
        pauses = _pauses()
        while True:
            (state,) = await self._manager.show(unit, *_STATE)
            if state["ActiveState"] == "inactive":
                return
            if state["ActiveState"] == "failed":
                await self._manager.call("reset-failed", unit)
            else:
                with contextlib.suppress(SystemdError):
                    await self._manager.call("kill", "--signal=SIGKILL", unit)
            await asyncio.sleep(next(pauses))

    def _keep(self, process: UnitProcess) -> UnitProcess:
        self._processes = [one for one in self._processes if not one.exited.done()]
        self._processes.append(process)
        return process


def _pauses() -> Iterator[float]:
    """Between looks: most things are there at once, the others take a while. For ever."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _why(state: Properties) -> str:
    return _REASONS.get(state["Result"], f"state {state['ActiveState']}, result {state['Result']}")
