"""A worker that costs next to nothing: what is measured before it is the gateway.

    python -m bench.fake_worker --port 9001

Answers every POST with a small chat completion, or, for `"stream": true`, with `max_tokens` server-sent
events: one HTTP chunk and one write for each. `--pause` seconds pass between two events; with 0, each stream
writes one event in every turn of the event loop. GET /stats tells how many connections and streams are open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
from typing import cast

import httptools
import uvloop

MODEL, SLOT = "m", "m-0"
_MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
_STREAMS = re.compile(rb'"stream":\s*true')
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
_USAGE = b"x-pagefleet-usage: 12,16,0,stop\r\n"
_SSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CONTENT = "Rivers carry water, silt and stories from the mountains down to the sea."


def answer() -> bytes:
    """The body of every unstreamed answer."""
    usage = {"prompt_tokens": 12, "completion_tokens": 16, "total_tokens": 28}
    message = {"role": "assistant", "content": CONTENT}
    choices = [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
    base = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1764460800, "model": MODEL}
    return json.dumps({**base, "choices": choices, "usage": usage}).encode()


def token(number: int) -> str:
    return f" t{number % 1000}"


def event(number: int) -> bytes:
    """One event of a stream, as a chat completion chunk."""
    base = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1764460800, "model": MODEL}
    choice = {"index": 0, "delta": {"content": token(number)}, "finish_reason": None}
    return b"data: %b\n\n" % json.dumps({**base, "choices": [choice]}).encode()


def stream_body(tokens: int) -> bytes:
    """The whole body of a stream, without its chunks' frames."""
    return b"".join(map(event, range(tokens))) + b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_ANSWER = _JSON % (_USAGE, len(answer()), answer())
_EVENTS = [chunk(event(number)) for number in range(1000)]
_END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Worker:
    """Counters over all connections. `pause`: seconds between two events of a stream."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.connections = 0
        self.streams = 0
        self.aborted = 0

    def stats(self) -> bytes:
        counts = {"connections": self.connections, "streams": self.streams, "aborted": self.aborted}
        return json.dumps(counts).encode()

    def page(self, path: bytes) -> bytes:
        """What is asked with GET: probes and lists that some proxies want before they send anything."""
        if path == b"/stats":
            return self.stats()
        if path == b"/internal/whoami":
            return json.dumps({"slot": SLOT, "generation": 1, "model": MODEL, "pid": os.getpid()}).encode()
        if path.startswith(b"/internal/usage/"):
            usage = {
                "prompt_tokens": 12,
                "completion_tokens": 16,
                "cached_tokens": 0,
                "finish_reason": "stop",
            }
            return json.dumps([{"state": "ended", "usage": usage}] * (path.count(b",") + 1)).encode()
        return json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()


class _Client(asyncio.Protocol):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._path = b""
        self._body = b""
        self._left = 0
        self._next = 0
        self._held = False  # the reader is behind
        self._timer: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._worker.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.connections -= 1
        if self._timer is not None:
            self._timer.cancel()
            self._worker.streams -= 1
            self._worker.aborted += 1

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pause_writing(self) -> None:
        self._held = True

    def resume_writing(self) -> None:
        self._held = False

    # --- httptools

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = b""

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            page = self._worker.page(self._path)
            self._transport.write(_JSON % (b"", len(page), page))
        elif _STREAMS.search(self._body):
            found = _MAX_TOKENS.search(self._body)
            self._left = int(found[1]) if found else 16
            self._next = 0
            self._worker.streams += 1
            self._transport.write(_SSE)
            self._step()
        else:
            self._transport.write(_ANSWER)

    def _step(self) -> None:
        if not self._held:
            if not self._left:
                self._timer = None
                self._worker.streams -= 1
                self._transport.write(_END)
                return
            self._transport.write(_EVENTS[self._next % 1000])
            self._next += 1
            self._left -= 1
        pause = self._worker.pause or (0.001 if self._held else 0)
        self._timer = self._loop.call_later(pause, self._step) if pause else self._loop.call_soon(self._step)


async def serve(host: str, port: int, uds: str | None, pause: float) -> None:
    """Until SIGTERM. Prints its port, once it listens."""
    loop = asyncio.get_running_loop()
    worker = Worker(pause)
    if uds is not None:
        server = await loop.create_unix_server(lambda: _Client(worker), uds, backlog=2048)
    else:
        server = await loop.create_server(lambda: _Client(worker), host, port, backlog=2048)
    print(uds or server.sockets[0].getsockname()[1], flush=True)
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uds")
    parser.add_argument("--pause", type=float, default=0.0)
    arguments = parser.parse_args()
    serving = serve(arguments.host, arguments.port, arguments.uds, arguments.pause)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


if __name__ == "__main__":
    main()
