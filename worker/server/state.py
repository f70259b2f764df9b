"""ServerState: what the endpoints of one worker share."""

from __future__ import annotations

import asyncio
import hashlib
import time
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

import psutil

from contracts.errors import ApiError, bad_request, internal_error, model_not_found, unavailable
from contracts.headers import DRAINING, LOADING, QUEUE_FULL, REFUSED
from worker.config import WorkerConfig
from worker.grammar.check import GrammarChecker
from worker.ipc.client import RequestStream
from worker.ipc.messages import EngineInfo, EngineRequest, EngineStats, Progress
from worker.server.metrics import Metrics
from worker.server.text_model import TextModel
from worker.server.times import TimesBook
from worker.server.usage import UsageBook

if TYPE_CHECKING:
    from worker.server.tracing import Tracer

_COMPUTING_FACTOR = 10
_COMPUTING_SHARE = 0.05  # of one core: the machine may be shared by many
_SAMPLE_SECONDS = 0.5


class Engine(Protocol):
    """What the server needs of `worker.ipc.client.EngineClient`."""

    state: Literal["loading", "ready", "dead"]
    info: EngineInfo | None
    progress: Progress | None
    stats: EngineStats
    last_message: float
    failure: str | None

    @property
    def pid(self) -> int | None: ...

    @property
    def in_flight(self) -> int: ...

    def submit(self, request: EngineRequest) -> RequestStream: ...

    def abort(self, request_id: str) -> None: ...

    async def call(self, operation: str) -> str: ...


class Work(Protocol):
    """A request that the engine works on. `names`: ids that its client may know it by."""

    names: frozenset[str]

    def abort(self, error: ApiError) -> None:
        """End it from outside, with `error` as its answer."""


class Gate:
    """Counts the requests inside; once draining, lets no more in. `with gate:` is one request's stay."""

    def __init__(self) -> None:
        self.draining = False
        self.inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def check(self) -> None:
        """ApiError 503 while draining: the header says that the request may safely go elsewhere."""
        if self.draining:
            raise unavailable(
                "This worker is draining and takes no new requests.", DRAINING, headers={REFUSED: DRAINING}
            )

    def __enter__(self) -> None:
        self.check()
        self.inside += 1
        self._empty.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    async def wait_empty(self, timeout: float) -> bool:
        """Whether everybody has left within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


class ServerState:
    """Configuration, engine, text side, metrics, and the requests in work of one worker.

    `engine` and `text` are None until loading has got so far; `progress` is that of the time before.
    `stopped`, once set, is the answer to whatever has not reached the engine yet.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.names = config.model_names  # that requests may use; the first is the model's own
        self.engine: Engine | None = None
        self.text: TextModel | None = None
        self.progress = Progress("start", 0, 0)  # of what comes before the engine
        self.metrics = Metrics(self)
        self.times = TimesBook()
        self.gate = Gate()
        self.stopped: ApiError | None = None
        self.tracer: Tracer | None = None
        self.grammars: GrammarChecker | None = None  # once a request has asked for a form
        self.created = int(time.time())
        self.generations: set[Work] = set()
        self.usage = UsageBook()
        identity = f"{config.model}\n{config.dtype}\n{config.kv_cache_dtype}\n{config.rope_theta}"
        self.fingerprint = "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12]
        self._busy_since = time.monotonic()
        self._processor = ProcessorUse()

    @property
    def model_name(self) -> str:
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """ApiError 400 without a name, 404 for a name that isn't served here."""
        if not name:
            raise bad_request("model is missing; GET /v1/models lists the models.", "model", "model_missing")
        if name not in self.names:
            raise model_not_found(name)

    def ready(self) -> tuple[Engine, EngineInfo, TextModel]:
        """Engine, what it resolved, and the text side. ApiError 503 while loading, 500 with a dead engine."""
        engine = self.engine
        if self.stopped is not None:
            raise self.stopped
        if engine is not None and engine.state == "dead":
            raise engine_dead()
        if engine is None or engine.state != "ready" or engine.info is None or self.text is None:
            raise unavailable(
                "The model is still loading; GET /ready shows the progress.",
                "model_loading",
                retry_after=2,
                headers={REFUSED: LOADING},
            )
        return engine, engine.info, self.text

    def admit(self, work: Work, requests: int) -> None:
        """Call before the engine gets so many requests; `generations` has the work from then on. ApiError 503
        when they would be too many."""
        engine, info, _ = self.ready()
        if requests > info.max_num_seqs + self.config.max_waiting - engine.in_flight:
            raise unavailable(
                "Too many requests are waiting for this model; try again.",
                QUEUE_FULL,
                headers={REFUSED: QUEUE_FULL},
            )
        if engine.in_flight == 0:  # an idle engine isn't stalled, however old its last step
            self._busy_since = time.monotonic()
        self.generations.add(work)

    def stalled_for(self) -> float:
        """Seconds for which the engine has had work and taken no step; 0.0 when it has none."""
        engine = self.engine
        if engine is None or engine.state != "ready" or engine.in_flight == 0:
            return 0.0
        return time.monotonic() - max(engine.last_message, self._busy_since)

    def stall_limit(self) -> float:
        """Seconds that a step may take now: `config.stall_limit`, and ten times that while an engine on a CPU
        computes, since a step of a large model takes minutes there."""
        engine = self.engine
        limit = self.config.stall_limit
        if engine is None or engine.info is None or engine.info.device != "cpu" or engine.pid is None:
            return limit
        return limit * _COMPUTING_FACTOR if self._processor.computes(engine.pid) else limit


class ProcessorUse:
    """Whether a process computes or waits, by the processor time it took since it was last asked about."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._used = 0.0
        self._computes = False

    def computes(self, pid: int) -> bool:
        now = time.monotonic()
        if now - self._asked < _SAMPLE_SECONDS:  # too short to tell
            return self._computes
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return False
        used = times.user + times.system
        self._computes = used - self._used > _COMPUTING_SHARE * (now - self._asked)
        self._asked, self._used = now, used
        return self._computes


def engine_dead() -> ApiError:
    return internal_error(
        "The engine of this worker has ended; the request was not completed. Try again.", "engine_dead"
    )
