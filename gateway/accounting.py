"""What requests really used: asked of their workers after the fact, in batches, off the requests' path.

A whole answer says it in a header. Streams and requests whose client left are asked about here: one question
at a time goes to each worker, with all names that wait by then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from contracts.headers import USAGE
from contracts.usage import MAX_IDS, Usage, UsageReport, parse_usage
from gateway.connection import UpstreamError
from gateway.upstream import Upstream

ANSWER_SECONDS = 2.0  # for one question; a worker waits half a second of it for requests that are ending
PATIENCE_SECONDS = 10.0  # for one request: its abort waits for the step that it is in
PAUSE_SECONDS = 0.1
MAX_WAITING = 20_000  # names for one worker
MAX_ANSWER = 64 * 1024  # bytes
CLOSE_SECONDS = 2.0

OnUsage = Callable[[Usage | None], None]

_decoder = msgspec.json.Decoder(list[UsageReport])
_USAGE = USAGE.encode()
_PROCESS = secrets.token_hex(8).encode() + b"-"
_serial = itertools.count(1)

log = logging.getLogger(__name__)


class Bill:
    """What one request used, as far as it is known.

    `line`: the header line that makes a worker keep it, under a name that no client can guess or choose;
    `address`: of the worker that may have begun on it, "" for none.
    """

    __slots__ = ("_number", "address", "line", "usage")

    def __init__(self) -> None:
        self._number = b"%x" % next(_serial)
        self.line = b"%b: %b%b\r\n" % (_USAGE, _PROCESS, self._number)
        self.address = ""
        self.usage: Usage | None = None

    @property
    def name(self) -> bytes:
        return _PROCESS + self._number

    def answered(self, header: bytes) -> None:
        """`header`: what the head of the worker's answer says about it, if anything."""
        if header:
            self.usage = parse_usage(header)


@dataclass(slots=True)
class _Question:
    name: bytes
    ends_at: float
    done: OnUsage


@dataclass(frozen=True)
class _Timeouts:
    connect: float = ANSWER_SECONDS
    first_byte: float = ANSWER_SECONDS
    idle: float = ANSWER_SECONDS
    total: float = ANSWER_SECONDS


class UsageCollector:
    """Finds out what requests used. `unknown` counts those of which nobody could say it."""

    def __init__(self, upstream: Upstream) -> None:
        self.unknown = 0
        self._upstream = upstream
        self._waiting: dict[str, deque[_Question]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    def close(self, bill: Bill, done: OnUsage) -> None:
        """The request is over: `done` gets what it used, now or when its worker has said it.

        None when that is gone, knows nothing of it, or doesn't end it in time. Never waits, never raises.
        """
        if not bill.address:
            self._tell(done, Usage())
        elif bill.usage is not None:
            self._tell(done, bill.usage)
        else:
            self._ask(bill.address, bill.name, done)

    def _ask(self, address: str, name: bytes, done: OnUsage) -> None:
        waiting = self._waiting.setdefault(address, deque())
        if self._closing or len(waiting) >= MAX_WAITING:
            self._give_up(done)
            return
        waiting.append(_Question(name, asyncio.get_running_loop().time() + PATIENCE_SECONDS, done))
        if address not in self._asking:
            self._asking[address] = asyncio.create_task(self._ask_all(address), name="usage")

    async def aclose(self) -> None:
        """Waits a moment for what is asked; the rest stays unknown."""
        self._closing = True
        tasks = list(self._asking.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
        for waiting in self._waiting.values():
            while waiting:
                self._give_up(waiting.popleft().done)

    async def _ask_all(self, address: str) -> None:
        waiting = self._waiting[address]
        try:
            while waiting:
                batch = [waiting.popleft() for _ in range(min(MAX_IDS, len(waiting)))]
                reports: list[UsageReport] = []
                try:
                    reports = await self._fetch(address, batch)
                except (UpstreamError, msgspec.MsgspecError) as error:
                    log.debug("usage of %d requests on %s: %s", len(batch), address, error)
                finally:  # also when cancelled: everybody who asked is answered, or waits
                    unanswered = self._answer(batch, reports)
                    waiting.extend(unanswered)
                if unanswered and len(unanswered) == len(waiting):
                    await asyncio.sleep(PAUSE_SECONDS)
            del self._waiting[address]
        finally:
            del self._asking[address]

    def _answer(self, batch: list[_Question], reports: list[UsageReport]) -> list[_Question]:
        """Tells those whose usage is known or past hope; the others."""
        now = asyncio.get_running_loop().time()
        if len(reports) != len(batch):
            reports = [UsageReport("unknown")] * len(batch)
        unanswered = []
        for question, report in zip(batch, reports, strict=True):
            if report.state == "ended":
                self._tell(question.done, report.usage)
            elif now >= question.ends_at:
                self._give_up(question.done)
            else:
                if report.state == "unknown":  # it may not have read the request yet, but not for long
                    question.ends_at = min(question.ends_at, now + ANSWER_SECONDS)
                unanswered.append(question)
        return unanswered

    async def _fetch(self, address: str, batch: list[_Question]) -> list[UsageReport]:
        """One report each. UpstreamError or MsgspecError when there are none."""
        names = b",".join([question.name for question in batch])
        head = b"GET /internal/usage/%b HTTP/1.1\r\nhost: worker\r\n\r\n" % names
        connection = self._upstream.take(address) or await self._upstream.connect(address, ANSWER_SECONDS)
        try:
            ends_at = asyncio.get_running_loop().time() + ANSWER_SECONDS
            connection.start(head, b"", _Timeouts(), ANSWER_SECONDS, ends_at)
            await connection.head()
            body = bytearray()
            while piece := await connection.read():
                body += piece
                if len(body) > MAX_ANSWER:
                    raise UpstreamError("protocol", "too long an answer")
            if connection.status == 200:
                return _decoder.decode(body)
            if b"usage_unknown" not in body:  # another kind of worker, which keeps no usage
                for question in batch:
                    question.ends_at = 0.0
            return [UsageReport("unknown")] * len(batch)
        finally:
            self._upstream.give_back(connection)

    def _give_up(self, done: OnUsage) -> None:
        self.unknown += 1
        self._tell(done, None)

    def _tell(self, done: OnUsage, usage: Usage | None) -> None:
        try:
            done(usage)
        except Exception:
            log.exception("what a request used could not be noted")
