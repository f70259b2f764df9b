"""What a worker tells systemd: how far its start is, that it is ready, that it gets on, that it ends."""

from __future__ import annotations

import asyncio

from contracts.notify import Notifier
from worker.server.state import ServerState

_STARTING_SECONDS, _SERVING_SECONDS = 0.5, 5.0  # between two looks


class Supervision:
    """Reports on `state` until cancelled.

    The start may take as long as it moves: each progress gives it another `start_timeout` seconds. Later,
    signs of life come only while the engine takes steps or has nothing to do, so that the watchdog ends a
    worker whose engine hangs, and leaves a busy one alone.
    """

    def __init__(self, state: ServerState, notifier: Notifier, start_timeout: float) -> None:
        self._state = state
        self._notifier = notifier
        self._start_timeout = start_timeout
        self._progress: tuple[str, float, float] | None = None  # as the manager knows it
        self._is_ready = False
        self._is_stopping = False

    async def run(self) -> None:
        if not self._notifier.is_used:
            return
        serving = min(_SERVING_SECONDS, self._notifier.watchdog or _SERVING_SECONDS)
        while True:
            self.look()
            await asyncio.sleep(serving if self._is_ready else min(serving, _STARTING_SECONDS))

    def stopping(self) -> None:
        """A signal has ended the service; requests in work are finished."""
        self._is_stopping = True
        self._notifier.stopping(self._status(hangs=False))

    def look(self) -> None:
        """Says what is new. What the manager could not take is said again the next time."""
        if not self._is_ready and not self._is_stopping:
            self._rise()
            return
        hangs = self._hangs()
        self._notifier.status(self._status(hangs))
        if not hangs:
            self._notifier.alive()

    def _rise(self) -> None:
        engine = self._state.engine
        if engine is not None and engine.state == "ready" and self._state.text is not None:
            self._is_ready = self._notifier.ready(self._status(hangs=False))
            return
        progress = (engine.progress if engine else None) or self._state.progress
        now = (progress.phase, progress.done, progress.total)
        share = f" {progress.done / progress.total:.0%}" if progress.total else ""
        status = f"{self._state.model_name}: {progress.phase}{share}"
        if now != self._progress and self._notifier.progress(status, self._start_timeout):
            self._progress = now

    def _hangs(self) -> bool:
        return self._state.stalled_for() > self._state.stall_limit()

    def _status(self, hangs: bool) -> str:
        name, gate = self._state.model_name, self._state.gate
        if hangs:
            return f"{name}: the engine has taken no step for {self._state.stalled_for():.0f} s"
        return (
            f"{name}: {'draining' if gate.draining or self._is_stopping else 'ready'}, {gate.inside} requests"
        )
