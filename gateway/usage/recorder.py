"""From finished requests to their places, off the requests' path: a queue, and a thread that empties it.

A request costs its gateway one append. The thread works for a moment at a time and sleeps in between: to let
go of the interpreter alone isn't enough, as where both have one core the other thread only gets it then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gateway.metrics import Metrics
from gateway.usage.audit_file import AuditFile
from gateway.usage.record import Record
from gateway.usage.sinks import AuditSink, Sink, Unwritten, UsageSink
from gateway.usage.store import USAGE_FILE, UsageStore

FLUSH_SECONDS = 0.25
CHUNK = 32  # records that are taken at once
STINT_SECONDS = 0.0002  # of work between two breaths; each costs the event loop several changes of thread
BREATH_SECONDS = 0.0005
MAX_QUEUED = 100_000  # records that wait for the thread
CLOSE_SECONDS = 10.0

log = logging.getLogger(__name__)


class Recorder:
    """Hands records to its sinks, every `FLUSH_SECONDS`, in a thread of its own.

    `on_lost` and `on_failure` are told, from that thread, how many records a sink lost, and that it could
    not write. `with_bodies`: whether records should have them.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        on_lost: Callable[[str, int], None] = lambda name, count: None,
        on_failure: Callable[[str], None] = lambda name: None,
        with_bodies: bool = False,
    ) -> None:
        self.with_bodies = with_bodies
        self._sinks = sinks
        self._on_lost = on_lost
        self._on_failure = on_failure
        self._queue: deque[Record] = deque()
        self._overflowed = 0
        self._failing: dict[str, int] = {}  # sink → what it had lost when it began to fail
        self._reported = dict.fromkeys((sink.name for sink in sinks), 0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        """From the event loop; never fails and never waits."""
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(record)
        else:
            self._overflowed += 1

    def close(self) -> None:
        """Writes what is left; at most for `CLOSE_SECONDS`."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("audit and usage: what was left could not be written within %g s", CLOSE_SECONDS)
        self._thread = None

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._stop.wait(FLUSH_SECONDS)
            try:
                self._empty()
            except Exception:  # a bug; the thread must live on, or the queue would only fill
                log.exception("audit and usage: records were lost")
        for sink in self._sinks:
            left = sink.close()
            if left:
                self._on_lost(sink.name, left)
                log.error("%s: %d requests could not be written before the end", sink.name, left)

    def _empty(self) -> None:
        rest_at = time.perf_counter() + STINT_SECONDS
        while self._queue:
            records = [self._queue.popleft() for _ in range(min(CHUNK, len(self._queue)))]
            for sink in self._sinks:
                sink.take(records)
            if time.perf_counter() >= rest_at and not self._stop.is_set():
                time.sleep(BREATH_SECONDS)
                rest_at = time.perf_counter() + STINT_SECONDS
        for sink in self._sinks:
            self._flush(sink)

    def _flush(self, sink: Sink) -> None:
        """A sink that can't write is named in the log once, and once more when it can."""
        try:
            sink.flush()
        except Unwritten as error:
            self._on_failure(sink.name)
            if sink.name not in self._failing:
                self._failing[sink.name] = sink.lost
                log.error("%s; requests go on", error)
        else:
            before = self._failing.pop(sink.name, None)
            if before is not None:
                log.warning("%s: written again; %d requests were lost", sink.name, sink.lost - before)
        self._count_lost(sink)

    def _count_lost(self, sink: Sink) -> None:
        lost = sink.lost + self._overflowed
        if lost > self._reported[sink.name]:
            self._on_lost(sink.name, lost - self._reported[sink.name])
            self._reported[sink.name] = lost


class _AuditSettings(Protocol):
    @property
    def file(self) -> Path | None: ...
    @property
    def prompts(self) -> bool: ...
    @property
    def max_size(self) -> int: ...
    @property
    def keep(self) -> int: ...


class RecordSettings(Protocol):
    """The part of the gateway's settings that says what is written down."""

    @property
    def audit(self) -> _AuditSettings: ...
    @property
    def usage(self) -> bool: ...
    @property
    def usage_by_hour(self) -> float: ...


def open_recorder(settings: RecordSettings, state_dir: Path, metrics: Metrics) -> Recorder | None:
    """As the fleet file says, to be started and closed; None where nothing is written down."""
    sinks: list[Sink] = []
    audit = settings.audit
    if audit.file is not None:
        sinks.append(AuditSink(AuditFile(audit.file, audit.max_size, audit.keep)))
    if settings.usage:
        sinks.append(UsageSink(UsageStore(state_dir / USAGE_FILE), settings.usage_by_hour))
    if not sinks:
        return None
    lost = metrics.counter(
        "pagefleet_gateway_records_lost_total", "Requests that could not be written down.", ["kind"]
    )
    failures = metrics.counter(
        "pagefleet_gateway_record_failures_total", "Attempts to write down requests that failed.", ["kind"]
    )
    for sink in sinks:  # now: other threads may count only what is there
        lost.inc((sink.name,), 0)
        failures.inc((sink.name,), 0)
    return Recorder(
        sinks,
        on_lost=lambda name, count: lost.inc((name,), count),
        on_failure=lambda name: failures.inc((name,)),
        with_bodies=audit.prompts and audit.file is not None,
    )
