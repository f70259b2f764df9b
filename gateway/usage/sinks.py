"""Where records go: lines of the audit file, sums in the file of usage. For the recorder's thread only."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from gateway.usage.audit_file import AuditFile
from gateway.usage.record import Record, inert, line_of
from gateway.usage.store import COUNTS, HOUR, Row, Sums, UsageStore, UsageUnusable

MAX_UNWRITTEN = 16 * 1024**2  # bytes of lines kept for a file that can't be written
MAX_ROWS = 20_000  # distinct users, keys and models in an hour, by one gateway
HOURS_AT_ONCE = 2  # in which requests end that began in them
FOLD_SECONDS = 600.0  # between two looks for what has grown old
OVER_LIMIT = 429  # a request that its user's limits refused, which says nothing of workers
OTHERS = "(others)"  # the user of what is beyond that: with `auth: none`, names cost nothing


class Unwritten(Exception):
    """A sink's file can't be written now."""


class Sink(Protocol):
    """`lost` counts the records for which there was no room."""

    name: str
    lost: int

    def take(self, records: Sequence[Record]) -> None:
        """Keeps them for the next `flush`."""

    def flush(self) -> None:
        """Writes what is kept; Unwritten when that can't be done, and then all of it is still kept."""

    def close(self) -> int:
        """How many records were still kept."""


class AuditSink:
    """A JSON line for each record."""

    name = "audit"

    def __init__(self, file: AuditFile) -> None:
        self.lost = 0
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._chunks: deque[tuple[bytes, int]] = deque()
        self._bytes = 0

    def take(self, records: Sequence[Record]) -> None:
        lines = inert(self._encoder.encode_lines([line_of(record) for record in records]))
        if self._bytes + len(lines) > MAX_UNWRITTEN:
            self.lost += len(records)
            return
        self._chunks.append((lines, len(records)))
        self._bytes += len(lines)

    def flush(self) -> None:
        while self._chunks:
            lines = self._chunks[0][0]
            try:
                self._file.append(lines)
            except OSError as error:
                raise Unwritten(f"the audit file {self._file.path} can't be written: {error}") from None
            self._chunks.popleft()
            self._bytes -= len(lines)

    def close(self) -> int:
        self._file.close()
        return sum(count for _, count in self._chunks)


class UsageSink:
    """Sums of the requests that had a user and a model. `hours_kept`: seconds after which the hours of a day
    are put together, a few at a time."""

    name = "usage"

    def __init__(self, store: UsageStore, hours_kept: float = math.inf) -> None:
        self.lost = 0
        self._store = store
        self._hours_kept = hours_kept
        self._fold_at = 0.0
        self._rows: dict[Row, Sums] = {}
        self._known: dict[int, set[Row]] = {}  # of the hours that were met last, whatever the clock does

    def take(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.user is None or not record.model:
                continue
            row = (int(record.at) // HOUR * HOUR, record.user, record.key_id or "", record.model)
            sums = self._rows.get(row) or self._new_row(row)
            if sums is None:
                self.lost += 1
                continue
            sums[0] += 1
            if record.status >= 400:
                sums[2 if record.status == OVER_LIMIT else 1] += 1
            usage = record.usage
            if usage is not None:
                sums[3] += usage.prompt_tokens
                sums[4] += usage.completion_tokens
                sums[5] += usage.cached_tokens

    def _new_row(self, row: Row) -> Sums | None:
        hour, model = row[0], row[3]
        known = self._known[hour] = self._known.pop(hour, set())
        if len(self._known) > HOURS_AT_ONCE:
            del self._known[next(iter(self._known))]
        if row not in known:
            if len(known) >= MAX_ROWS:
                row = (hour, OTHERS, "", model)
            else:
                known.add(row)
        if len(self._rows) > 2 * MAX_ROWS:  # the file can't be written, for hours
            return self._rows.get(row)
        return self._rows.setdefault(row, [0] * len(COUNTS))

    def flush(self) -> None:
        if not self._rows:
            return
        try:
            self._store.add(self._rows)
            self._rows = {}
            self._fold(time.time())
        except UsageUnusable as error:
            raise Unwritten(str(error)) from None

    def _fold(self, now: float) -> None:
        waits = self._fold_at - FOLD_SECONDS <= now < self._fold_at  # unless the clock was set back
        if not waits and not self._store.fold(now - min(self._hours_kept, now)):
            self._fold_at = now + FOLD_SECONDS

    def close(self) -> int:
        self._store.close()
        return sum(sums[0] for sums in self._rows.values())
