"""A worker process from its first socket to its exit code: bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from contracts.errors import ApiError, unavailable
from contracts.notify import Notifier
from contracts.units import format_bytes, format_duration
from worker.config import EXIT_INVALID, WorkerConfig
from worker.ipc.client import EngineClient, EngineDead, engine_command, engine_spec
from worker.ipc.messages import EngineStats, Progress
from worker.server.app import create_app
from worker.server.listen import BindError, address, bind
from worker.server.protocol import BoundedProtocol
from worker.server.state import ServerState
from worker.server.supervision import Supervision
from worker.server.text_model import TextModel
from worker.weights.source import SourceUnavailable, resolve_source

if TYPE_CHECKING:
    from worker.server.tracing import Tracer

log = logging.getLogger("pagefleet.worker")

EXIT_OK, EXIT_FAILED = 0, 1
KEEP_ALIVE_SECONDS = 90  # longer than any gateway keeps an idle connection, so the gateway closes first
_ANSWER_SECONDS = 5.0  # for error answers to leave before the process does
_STATS_SECONDS = 10.0


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: the worker decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class WorkerProcess:
    """One worker serving on `sock`. `run` returns the exit code."""

    def __init__(self, config: WorkerConfig, sock: socket.socket) -> None:
        self.config = config
        self.state = ServerState(config)
        self.state.tracer = open_tracer(config)
        self._supervision = Supervision(self.state, Notifier.from_environment(), config.start_timeout)
        self._sock = sock
        self._client: EngineClient | None = None
        self._exit_code: asyncio.Future[int] | None = None  # set once the process is to stop
        self._signals = 0
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until a signal, the engine's death, or a failed start; everything started here is stopped."""
        loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        server = HttpServer(uvicorn_config(self.state))
        serving = asyncio.create_task(server.serve(sockets=[self._sock]), name="http")
        tasks = [
            asyncio.create_task(self._start(), name="load"),
            asyncio.create_task(self._supervision.run(), name="supervision"),
        ]
        if self.config.parent_pid is not None:
            tasks.append(asyncio.create_task(self._watch_parent(self.config.parent_pid), name="parent"))
        if not self.config.disable_log_stats:
            tasks.append(asyncio.create_task(self._log_stats(), name="stats"))
        log.info("listening on %s", address(self._sock))
        try:
            return await self._exit_code
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_serving(server, serving)

    async def _stop_serving(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        if self._client is not None:
            # While it loads it hears nothing, and has nothing to lose.
            await self._client.shutdown(_ANSWER_SECONDS if self._client.state == "ready" else 0.0)
        server.should_exit = True
        await serving
        if self.state.tracer is not None:
            await asyncio.to_thread(self.state.tracer.close)
        if self.state.grammars is not None:
            self.state.grammars.close()
        log.info("stopped")

    # ------------------------------------------------------------------ start

    async def _start(self) -> None:
        try:
            await self._load()
        except Exception as error:  # a bug: better an end that says so than a worker that loads for ever
            log.exception("the worker can't go on")
            self._fail(f"the worker can't go on: {error!r}")

    async def _load(self) -> None:
        """Load the text side here and the weights in the engine process; then watch the engine."""
        config = self.config
        started = time.monotonic()
        try:
            source = await asyncio.to_thread(
                resolve_source, config.model, self._note_download, config.revision
            )
            self.state.progress = Progress("start", 0, 0)
            text = await asyncio.to_thread(TextModel.load, source, config)
        except ValueError as error:
            code = EXIT_FAILED if isinstance(error, SourceUnavailable) else EXIT_INVALID
            self._fail(f"the model can't be served: {error}", code)
            return
        log.info("loading %s (%s)", config.model, source.kind)
        vocab_limit = text.tokenizer.vocab_size if text.tokenizer else None
        self._client = client = EngineClient(engine_command(engine_spec(config.model, config, vocab_limit)))
        self.state.text = text
        self.state.engine = client
        await client.start()
        try:
            info = await client.wait_ready()
        except EngineDead as error:
            # Starting again without another option would fail the same way.
            code = EXIT_INVALID if client.failure_is_permanent else EXIT_FAILED
            self._fail(f"the engine did not start: {error}", code)
            return
        log.info(
            "ready after %s: %s, %s, weights %s, KV cache %s (%d pages of %d tokens, %s), max_model_len %d",
            format_duration(time.monotonic() - started),
            info.device,
            info.dtype,
            format_bytes(info.weight_bytes),
            format_bytes(info.kv_cache_bytes),
            info.num_pages,
            info.page_size,
            info.kv_cache_dtype,
            info.max_model_len,
        )
        await client.dead.wait()
        # The streams have been told already; they answer their clients before the process goes.
        await self.state.gate.wait_empty(_ANSWER_SECONDS)
        self._fail(f"the engine has ended: {client.failure}")

    def _note_download(self, done: int, total: int) -> None:
        """Called on another thread."""
        self.state.progress = Progress("download", done, total)

    def _fail(self, message: str, code: int = EXIT_FAILED) -> None:
        log.error("%s", message)
        self._exit(code)

    def _exit(self, code: int) -> None:
        if self._exit_code is not None and not self._exit_code.done():
            self._exit_code.set_result(code)

    # ------------------------------------------------------------------- stop

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals == 1:
            self._supervision.stopping()
            log.info("%s: draining, %d requests in work", name, self.state.gate.inside)
            self._stopping = asyncio.create_task(self._drain(), name="drain")
        elif self._signals == 2:
            log.info("%s again: aborting %d requests", name, self.state.gate.inside)
            self._abort_all(unavailable("The worker was stopped.", "shutting_down"))
            self._stopping = asyncio.create_task(self._leave(), name="leave")

    async def _drain(self) -> None:
        """Let running requests finish, up to the drain limit; what still runs then ends with an error."""
        gate = self.state.gate
        gate.draining = True
        if not await gate.wait_empty(self.config.shutdown_timeout):
            limit = format_duration(self.config.shutdown_timeout)
            log.warning("drain limit of %s reached: aborting %d requests", limit, gate.inside)
            self._abort_all(
                unavailable(f"The worker was stopped; its drain limit is {limit}.", "shutting_down")
            )
        await self._leave()

    async def _leave(self) -> None:
        await self.state.gate.wait_empty(_ANSWER_SECONDS)
        self._exit(EXIT_OK)

    def _abort_all(self, error: ApiError) -> None:
        self.state.stopped = error
        for generation in list(self.state.generations):
            generation.abort(error)

    async def _watch_parent(self, pid: int) -> None:
        """End with the process that started this one, however it ended: nobody would stop this one later."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fail(f"process {pid} (--parent-pid) is gone")
            return
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._abort_all(unavailable("The worker was stopped.", "shutting_down"))
        self._fail(f"process {pid} (--parent-pid) is gone")

    async def _log_stats(self) -> None:
        """A line every few seconds while there is work."""
        previous = EngineStats()
        while True:
            await asyncio.sleep(_STATS_SECONDS)
            stats = self.state.engine.stats if self.state.engine else previous
            if stats.steps == previous.steps:
                continue
            prompts = stats.prompt_tokens - previous.prompt_tokens
            generated = stats.generation_tokens - previous.generation_tokens
            previous = stats
            log.info(
                "running %d, waiting %d, KV cache %.1f %%, prompt %.1f tokens/s, generated %.1f tokens/s",
                stats.running,
                stats.waiting,
                100 * stats.pages_used / max(1, stats.pages_total),
                prompts / _STATS_SECONDS,
                generated / _STATS_SECONDS,
            )


def open_tracer(config: WorkerConfig) -> Tracer | None:
    """None where tracing is off, which then costs nothing, not even memory."""
    if config.otlp_traces_endpoint is None:
        return None
    from contracts.spans import Spans
    from worker.server.tracing import Tracer

    place = f"{config.slot}.{config.generation}"
    spans = Spans(config.otlp_traces_endpoint, "pagefleet-worker", place)
    return Tracer(spans, config.trace_sample_ratio, config.model_names[0])


def uvicorn_config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        loop="none",
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,  # admin routes trust the peer's address, so no header may replace it
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(_ANSWER_SECONDS),
    )


def run_worker(config: WorkerConfig) -> int:
    """Serve as `config` says until told to stop; the exit code.

    Threads may still be at work when it returns: the caller ends the process without waiting for them.
    """
    try:
        sock = bind(config)
    except BindError as error:
        log.error("%s", error)
        return EXIT_INVALID
    import uvloop

    # The runner is not closed: it would wait for threads, and one may be deep in a download or a long prompt.
    code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_run(config, sock))
    if config.uds:
        Path(config.uds).unlink(missing_ok=True)
    return code


async def _run(config: WorkerConfig, sock: socket.socket) -> int:
    return await WorkerProcess(config, sock).run()
