"""EngineClient: the server process's handle on its engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

import msgspec

from contracts.options import WorkerOptions
from worker.ipc.channel import ChannelClosed, ServerChannel
from worker.ipc.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    Failed,
    FromEngine,
    Progress,
    Ready,
    RequestOutput,
    StepDone,
    ToEngine,
)

log = logging.getLogger("pagefleet.worker")


class EngineDead(RuntimeError):
    """The engine process has ended; the message says why as far as is known."""


class RequestStream:
    """Outputs of one request, in order; iteration ends after the one that carries `finish_reason`.

    Outputs that pile up while the consumer is busy are merged, so a slow consumer holds one object, not one a
    token. `received` counts the tokens that the engine made, also those that nobody waited for any more;
    `ended`: there will be no more of them.
    """

    def __init__(self) -> None:
        self.received = 0
        self.ended = False
        self._on_end: Callable[[], None] | None = None
        self._pending: RequestOutput | None = None
        self._arrived = asyncio.Event()
        self._finished = False
        self._left = False

    def put(self, output: RequestOutput) -> None:
        """What the engine says; after `leave` it is only counted."""
        self.received += len(output.token_ids)
        if not self._left:
            self._merge(output)
        if output.finish_reason is not None:
            self.ended = True
            if self._on_end is not None:
                self._on_end()

    def leave(self, output: RequestOutput) -> None:
        """Ends the iteration with `output`; the engine may still have something to say."""
        self._merge(output)
        self._left = True

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Calls it once `ended`: at once, or when the engine's last word arrives. One callback only."""
        if self.ended:
            callback()
        else:
            self._on_end = callback

    def _merge(self, output: RequestOutput) -> None:
        pending = self._pending
        if pending is None:
            self._pending = output
        else:
            if not pending.token_ids:
                pending.cached_tokens, pending.queue_time = output.cached_tokens, output.queue_time
            if output.prompt_logprobs is not None:
                pending.prompt_logprobs = (pending.prompt_logprobs or []) + output.prompt_logprobs
            pending.token_ids += output.token_ids
            if output.logprobs is not None:
                pending.logprobs = (pending.logprobs or []) + output.logprobs
            pending.finish_reason = output.finish_reason
            pending.stop_token = output.stop_token
            pending.error = output.error
            pending.refused = output.refused
            pending.late = output.late
        self._arrived.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        output, self._pending = self._pending, None
        assert output is not None
        self._finished = output.finish_reason is not None
        return output


class EngineClient:
    """Starts the engine process, sends it requests, hands back its outputs.

    `command` is the engine's argument vector; it is given `--fd N`, its end of the socket pair. Everything
    asked for during one turn of the event loop goes out as one message.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self.state: Literal["loading", "ready", "dead"] = "loading"
        self.info: EngineInfo | None = None
        self.progress: Progress | None = None
        self.stats = EngineStats()
        self.last_message = time.monotonic()
        self.failure: str | None = None
        self.failure_is_permanent = False  # an option must change before a restart can help
        self.dead = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._aborted: dict[str, RequestStream] = {}  # until the engine has heard of it
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._call_ids = itertools.count(1)
        self._outgoing = ToEngine()
        self._flush_scheduled = False
        self._channel: ServerChannel[FromEngine] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._streams)

    async def start(self) -> None:
        """Start the process and return at once; loading goes on in the background (see `state` and
        `progress`)."""
        ours = self._spawn()
        self._channel = await ServerChannel.open(ours, FromEngine)
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    def _spawn(self) -> socket.socket:
        """Start the process from this very thread: the kernel kills it when its starting thread ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs:
            command = [*self._command, "--fd", str(theirs.fileno())]
            # OpenMP threads that spin a while at barriers are a fifth faster than those that sleep at once;
            # spinning as long as libgomp does by default, they hold a core that other work needs. On shared
            # cores they crawl either way: a fleet gives each of its CPU workers a share of its own.
            # Huge pages under what malloc gives out, weights above all: seen 8 % faster on a CPU.
            tuned = {"GOMP_SPINCOUNT": "30000", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
            environment = tuned | os.environ
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        return ours

    async def wait_ready(self) -> EngineInfo:
        """EngineInfo once the engine has loaded; EngineDead when it can't."""
        while self.state == "loading":
            await asyncio.sleep(0.02)
        if self.info is None or self.state == "dead":
            raise EngineDead(self.failure or "the engine has ended")
        return self.info

    def submit(self, request: EngineRequest) -> RequestStream:
        """Queue a request. Raises EngineDead when there is no engine any more."""
        if self.state == "dead":
            raise EngineDead(self.failure or "the engine has ended")
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id} is in use")
        stream = self._streams[request.request_id] = RequestStream()
        self._outgoing.submit.append(request)
        self._schedule_flush()
        return stream

    def abort(self, request_id: str) -> None:
        """Stop generating for a request; unknown and finished ids are ignored. Its stream ends with reason
        "abort" at once, and has `ended` when the engine has stopped."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        stream.leave(RequestOutput(request_id, [], finish_reason="abort"))
        if self.state != "dead":
            self._aborted[request_id] = stream
            self._outgoing.abort.append(request_id)
            self._schedule_flush()

    async def call(self, operation: str) -> str:
        """Run "reset_prefix_cache", "check_integrity" or "ping" between two steps; the engine's answer, ""
        for done."""
        if self.state == "dead":
            raise EngineDead(self.failure or "the engine has ended")
        call_id = next(self._call_ids)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._outgoing.call.append((call_id, operation))
        self._schedule_flush()
        return await future

    async def shutdown(self, timeout: float = 5.0) -> None:
        """End the engine process: asked first, then killed. Leaves no zombie."""
        process = self._process
        if process is None:
            return
        if self.state != "dead":
            self._outgoing.shutdown = True
            self._flush()
        try:
            await asyncio.wait_for(asyncio.to_thread(process.wait), timeout)
        except TimeoutError:
            process.kill()
            await asyncio.to_thread(process.wait)
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._channel is not None:
            self._channel.close()

    def kill(self) -> None:
        """At once, for an exit that can't wait."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._channel is not None and self.state != "dead":
            message, self._outgoing = self._outgoing, ToEngine()
            self._channel.send(message)

    async def _read(self) -> None:
        assert self._channel is not None
        try:
            while True:
                for message in await self._channel.receive():
                    self._handle(message)
        except ChannelClosed:
            pass
        except Exception:
            log.exception("reading from the engine failed")
        await self._bury()

    def _handle(self, message: FromEngine) -> None:
        self.last_message = time.monotonic()
        match message:
            case StepDone():
                self.stats = message.stats
                for output in message.outputs:
                    streams = self._streams if output.request_id in self._streams else self._aborted
                    stream = streams.get(output.request_id)
                    if stream is not None:
                        if output.finish_reason is not None:
                            del streams[output.request_id]
                        stream.put(output)
                for call_id, result in message.replies:
                    future = self._calls.pop(call_id, None)
                    if future is not None and not future.done():
                        future.set_result(result)
            case Progress():
                self.progress = message
            case Ready():
                self.info = message.info
                self.state = "ready"
            case Failed():
                self.failure, self.failure_is_permanent = message.message, message.permanent

    async def _bury(self) -> None:
        """End-of-file: find out how the process ended and tell everybody who waits."""
        assert self._process is not None
        try:
            code: int | None = await asyncio.wait_for(asyncio.to_thread(self._process.wait), 5)
        except TimeoutError:
            self._process.kill()
            code = None
        if self.failure is None:
            how = "did not end" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
            if code == -signal.SIGBUS:
                how += ", SIGBUS: a file that it reads was cut meanwhile, or its disk or memory fails"
            self.failure = f"the engine process has ended ({how})"
        self.state = "dead"
        streams = {**self._streams, **self._aborted}
        self._streams, self._aborted = {}, {}
        for request_id, stream in streams.items():
            stream.put(RequestOutput(request_id, [], finish_reason="error", error=self.failure))
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineDead(self.failure))
        self.dead.set()


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """What arrives on any of the streams, as it arrives: (which, output), all that is there at a time."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield [(0, output)]
        return
    waiting = {asyncio.ensure_future(stream.__anext__()): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            arrived = sorted(((waiting.pop(future), future.result()) for future in done), key=_place)
            yield arrived
            for place, output in arrived:
                if output.finish_reason is None:
                    waiting[asyncio.ensure_future(streams[place].__anext__())] = place
    finally:
        for future in waiting:
            future.cancel()


def _place(arrived: tuple[int, RequestOutput]) -> int:
    return arrived[0]


def engine_spec(model: str, options: WorkerOptions, vocab_limit: int | None) -> str:
    """The engine's options as JSON (worker.engine.process.EngineSpec): sizes as plain numbers of bytes.
    `vocab_limit`: the tokenizer's size."""
    values = {name: getattr(options, name) for name in WorkerOptions.model_fields}
    return msgspec.json.encode({"model": model, "options": values, "vocab_limit": vocab_limit}).decode()


def engine_command(options_json: str) -> list[str]:
    """The engine's argument vector for resolved options (see worker.engine.process)."""
    return [
        sys.executable,
        "-P",  # a folder `worker/` where the operator stands is not ours
        "-m",
        "worker.engine.process",
        "--options",
        options_json,
        "--parent-pid",
        str(os.getpid()),
    ]
