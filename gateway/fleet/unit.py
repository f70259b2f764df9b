"""One supervised process: started, watched, restarted, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from gateway.fleet.backends.base import Backend, Found, Process, Role
from gateway.fleet.commands import is_as_good
from gateway.fleet.logs import inert, tail
from gateway.fleet.oom import OomWatch
from gateway.fleet.probes import Probe, Progress, WrongProcess
from gateway.fleet.restart import RestartPolicy

UnitState = Literal["waiting", "starting", "ready", "draining", "backoff", "failed", "stopping", "stopped"]
T = TypeVar("T")

EXIT_BAD_CONFIGURATION = 2  # starting again can't help
ORDERLY_PAUSE = 1.0  # seconds
_LAST_WORDS = 12
_ERROR_LINE = re.compile(r"\S+ \S+ (?:ERROR|CRITICAL) \S+: (.+)")  # as workers and gateways log


class UnitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a unit; `since`, `retry_at`: Unix times; `error` and `log_tail`: after a failure,
    until it is ready again; `last_exit`: why its last process ended, also when another is ready."""

    slot: str
    role: Role
    model: str | None = None
    variant: str = ""
    state: UnitState = "waiting"
    phase: str = ""
    done: float = 0
    total: float = 0
    pid: int | None = None
    generation: int = 0
    restarts: int = 0
    since: float = 0
    retry_at: float | None = None
    error: str | None = None
    last_exit: str | None = None
    log_tail: tuple[str, ...] = ()
    log: str = ""


@dataclass(frozen=True)
class Timing:
    """Seconds. `start_stall`: a start without progress; `unhealthy`: /health failing all the time."""

    start_stall: float = 120.0
    unhealthy: float = 30.0
    start_poll: float = 0.1
    health_poll: float = 2.0
    drain: float = 30.0
    stop_margin: float = 5.0  # on top of `drain`, for the process to end after its last request
    housekeeping: float = 5.0
    policy: Callable[[], RestartPolicy] = RestartPolicy


@dataclass(frozen=True)
class UnitSpec:
    """How to start one unit. `launch` and `probe` get the generation; the start has `gpus` to itself;
    `memory`: what it may take of the host's, where the backend limits that."""

    slot: str
    role: Role
    log: Path
    launch: Callable[[int], list[str]]
    probe: Callable[[int], Probe]
    model: str | None = None
    variant: str = ""
    gpus: tuple[int, ...] = ()
    fds: tuple[int, ...] = ()
    memory: Callable[[], int | None] | None = None


@dataclass
class StartLocks:
    """One start per GPU at a time, since a start measures memory; CPU workers start together."""

    _locks: dict[int, asyncio.Lock] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def hold(self, gpus: Iterable[int]) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for gpu in sorted(set(gpus)):
                await stack.enter_async_context(self._locks.setdefault(gpu, asyncio.Lock()))
            yield


@dataclass(frozen=True)
class _End:
    """Why a life ended, and whether another is pointless; `orderly`: it was asked to end, it didn't crash."""

    reason: str
    fatal: bool = False
    orderly: bool = False
    by_itself: bool = False  # its log says more than its exit code
    hint: str = ""


class Unit:
    """Runs one slot. `on_change` is called with each new status, at once and in the loop's thread.

    `repaired`: whether the process is started again when it ends; may be changed at any time. `generation`:
    of the slot's last process before. `found`: the process of an earlier supervisor, which is kept if it is
    what would be started, and else ends first.
    """

    def __init__(
        self,
        spec: UnitSpec,
        backend: Backend,
        locks: StartLocks,
        timing: Timing,
        on_change: Callable[[UnitStatus], None],
        *,
        generation: int = 0,
        found: Found | None = None,
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._locks = locks
        self._timing = timing
        self._on_change = on_change
        self._policy = timing.policy()
        self._child: Process | None = None
        self._found = found
        self._log_start = 0
        self._oom = OomWatch()
        self._is_renewed = False
        self.repaired = True
        self.status = UnitStatus(
            slot=spec.slot,
            role=spec.role,
            model=spec.model,
            variant=spec.variant,
            generation=generation,
            since=time.time(),
            log=str(spec.log),
        )
        if found is not None:
            self._adopt(found)

    def _adopt(self, found: Found) -> None:
        """Its state is published as it was, before anybody is asked: a worker that serves goes on serving."""
        self._child = found.process
        is_ours = is_as_good(found.argv, self._spec.launch(found.generation))
        state: UnitState = ("ready" if found.ready else "starting") if is_ours else "stopping"
        self.status = msgspec.structs.replace(
            self.status, state=state, phase=state, generation=found.generation, pid=found.process.pid
        )

    async def run(self) -> None:
        """Keeps the unit alive until it has failed for good, or has ended and isn't to be repaired; cancel it
        before `stop`."""
        if self.status.state == "stopping":  # found, and not what is wanted now
            await self.stop(self._timing.drain + self._timing.stop_margin)
            self._found = None
        while True:
            if self._found is not None and self._found.ready:
                end, probe = await self._rise(self._found.process)
            else:
                if self._found is None:
                    self._set(state="waiting", pid=None)
                async with self._locks.hold(self._spec.gpus):
                    end, probe = await self._start()
            self._found = None
            ready_at = time.monotonic()
            if end is None and probe is not None:
                end = await self._watch(probe)
            assert end is not None
            await self._clear()
            if self._is_renewed:
                self._is_renewed = False
                continue
            now = time.monotonic()
            delay: float | None = ORDERLY_PAUSE
            if not self.repaired:
                delay = None
            elif not end.orderly:
                delay = None if end.fatal else self._policy.after_crash(now, now - ready_at)
            words = tuple(map(inert, tail(self._spec.log, _LAST_WORDS, self._log_start)))
            reason = _in_its_words(end, words)
            self._set(
                state="failed" if delay is None else "backoff",
                phase="",
                pid=None,
                error=reason,
                last_exit=reason,
                log_tail=words,
                retry_at=None if delay is None else time.time() + delay,
            )
            if delay is None:
                return
            await asyncio.sleep(delay)
            if not self.repaired:  # any more
                self._set(state="failed", retry_at=None)
                return
            self._set(restarts=self.status.restarts + (not end.orderly), retry_at=None)

    async def stop(self, patience: float) -> None:
        """Ends the process: asks, waits `patience` seconds, kills."""
        if self._child is not None and not self._child.exited.done():
            self._set(state="stopping", phase="draining")
            await self._child.stop(patience)
        self._set(state="stopped", phase="", pid=None, retry_at=None)

    async def renew(self, patience: float) -> None:
        """Ends the process as `stop` does; `run` starts the next one at once."""
        child = self._child
        if child is not None and not child.exited.done():
            self._is_renewed = True
            await child.stop(patience)

    def set_timing(self, timing: Timing) -> None:
        """For what begins from now on."""
        self._timing = timing

    def kill(self) -> None:
        """Ends the process now; a `stop` under way returns soon after."""
        if self._child is not None:
            self._child.kill()

    async def _start(self) -> tuple[_End | None, Probe | None]:
        if self._found is not None:  # in the middle of its start
            return await self._rise(self._found.process)
        generation = self.status.generation + 1
        log = self._spec.log
        self._log_start = log.stat().st_size if log.exists() else 0
        try:
            child = self._backend.spawn(
                self._spec.launch(generation),
                role=self._spec.role,
                slot=self._spec.slot,
                generation=generation,
                log=log,
                fds=self._spec.fds,
                memory=self._spec.memory,
            )
        except OSError as error:
            return _End(f"can't be started: {error}"), None
        self._child = child
        self._set(state="starting", phase="starting", done=0, total=0, pid=child.pid, generation=generation)
        return await self._rise(child)

    async def _rise(self, child: Process) -> tuple[_End | None, Probe | None]:
        """Waits for what was started to be ready."""
        probe = self._spec.probe(self.status.generation)
        self._oom = OomWatch()
        self._oom.look()
        ready = False
        try:
            end = await self._await_ready(child, probe)
            ready = end is None
        finally:
            if not ready:  # also when the start is given up
                await probe.close()
        if end is not None:
            await self._clear()
            return end, None
        if self._found is not None:
            await probe.take_over()
        self._set(state="ready", phase="ready", done=0, total=0, error=None, log_tail=())
        return None, probe

    async def _await_ready(self, child: Process, probe: Probe) -> _End | None:
        """The readiness ladder: executed, says who it is, loads with progress, ready (None)."""
        last, moved_at = Progress(phase="starting"), time.monotonic()
        failure: str | None = None
        while True:
            try:
                progress = await _unless_exited(child, probe.progress())
            except WrongProcess as error:
                return _End(str(error))
            if child.exited.done():
                return self._exited(child, failure)
            self._oom.look()
            self._set(pid=child.pid)
            if progress is not None and progress.ready:
                return None
            if progress is not None and progress.failure is not None:
                failure = inert(progress.failure)
            elif progress is not None and progress != last:
                last, moved_at = progress, time.monotonic()
                self._set(phase=progress.phase, done=progress.done, total=progress.total)
            if time.monotonic() - moved_at > self._timing.start_stall:
                return _End(f"no progress for {self._timing.start_stall:g} s in phase '{last.phase}'")
            await asyncio.wait({child.exited}, timeout=self._timing.start_poll)

    async def _watch(self, probe: Probe) -> _End:
        child = self._child
        assert child is not None
        healthy_at = time.monotonic()
        try:
            while True:
                await asyncio.wait({child.exited}, timeout=self._timing.health_poll)
                health = await _unless_exited(child, probe.health())
                if child.exited.done():
                    return self._exited(child, was_ready=True)
                self._oom.look()
                now = time.monotonic()
                if health is not None:
                    healthy_at = now
                    state = "draining" if health.draining else "ready"
                    self._set(state=state, phase=state)
                elif now - healthy_at > self._timing.unhealthy:
                    return _End(f"made no progress for {now - healthy_at:.0f} s (/health), so it was killed")
        finally:
            await probe.close()

    def _exited(self, child: Process, failure: str | None = None, was_ready: bool = False) -> _End:
        end = _exit_end(child, failure, was_ready)
        is_explained = end.orderly or end.fatal or child.reason is not None
        if is_explained or not self._oom.has_killed():
            return end
        return replace(end, hint="just then the kernel ended a process for want of memory")

    async def _clear(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await asyncio.wait({child.exited})

    def _set(self, **changes: object) -> None:
        if changes.get("state", self.status.state) != self.status.state:
            changes["since"] = time.time()
        status = msgspec.structs.replace(self.status, **changes)
        if status != self.status:
            self.status = status
            self._on_change(status)


async def _unless_exited(child: Process, question: Awaitable[T]) -> T | None:
    """The answer, or None as soon as the process has ended."""
    task = asyncio.ensure_future(question)
    try:
        futures: set[asyncio.Future[T] | asyncio.Future[int]] = {task, child.exited}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()


def _exit_end(child: Process, failure: str | None = None, was_ready: bool = False) -> _End:
    """`failure`: why, in the process's own words."""
    code = child.exited.result()
    fatal = code == EXIT_BAD_CONFIGURATION
    if failure is not None:
        why = "did not start" if child.reason is None else child.reason
        return _End(f"{why}: {failure}", fatal)
    if fatal:
        return _End("refused its configuration (exit code 2)", fatal, by_itself=True)
    if child.reason is not None:
        return _End(child.reason)
    if code == 0 and was_ready:
        return _End("was asked to end (SIGTERM) and did", orderly=True)
    if code == -9:
        return _End("was killed (SIGKILL)", hint="if nobody did, the machine may be out of memory")
    if code < 0:
        return _End(f"was ended by signal {-code}")
    return _End(f"exited with code {code}", by_itself=True)


def _in_its_words(end: _End, log_tail: Sequence[str]) -> str:
    """Why a life ended, with the last error that the process logged when it ended by itself."""
    errors = [match[1] for match in map(_ERROR_LINE.fullmatch, log_tail) if match]
    reason = f"{end.reason}: {errors[-1]}" if end.by_itself and errors else end.reason
    return f"{reason}; {end.hint}" if end.hint else reason
