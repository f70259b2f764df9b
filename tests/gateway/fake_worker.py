"""A worker that misbehaves on request: a real HTTP/1.1 server, for tests and as a process of its own.

What it does is said in the body's field `fake`, since headers and addresses don't pass a gateway untouched:

    {"model": "m", "fake": {"do": "sse", "chunks": 60, "delay": 0.01, "die_at": 40}}

`do` names one of the `_do_` methods below; `wait` seconds pass before it. POST /fault with such a plan as
body makes it the plan of all requests to come, `null` ends that; with `{"health": 503}` it answers so to
probes, with `{"silent": true}` not at all, with `{"identity": ["other", 1]}` it lies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import uvloop

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@dataclass
class Seen:
    """One request as it arrived, and when its client went away (loop time)."""

    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    closed_at: float | None = None
    answered: bool = False
    refused: bool = False


@dataclass
class FakeWorker:
    """`requests` in order of arrival; `draining` and `full` make every request refused, with one or the other
    reason. `identity`: the slot and generation that it claims to be; `fault`: a plan for every request;
    `health`: its status there; `silent`: it answers no probes; `capacity`: what it says to compute at a time.
    """

    name: str = "w"
    requests: list[Seen] = field(default_factory=list)
    connections: set[_Client] = field(default_factory=set)
    accepted: int = 0
    draining: bool = False
    full: bool = False
    identity: tuple[str, int] | None = None
    fault: dict[str, Any] | None = None
    health: int = 200
    silent: bool = False
    capacity: int | None = None
    probes: int = 0
    metrics: bytes | None = b""  # what it answers to GET /metrics; None: nothing
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""
    server: asyncio.Server | None = None

    async def start(self, path: str | None = None, port: int = 0) -> FakeWorker:
        loop = asyncio.get_running_loop()
        if path is not None:
            self.server = await loop.create_unix_server(lambda: _Client(self), path, backlog=2048)
            self.address = f"unix:{path}"
        else:
            self.server = await loop.create_server(lambda: _Client(self), "127.0.0.1", port, backlog=2048)
            self.address = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()
        for client in list(self.connections):
            client.transport.abort()
        await asyncio.sleep(0)

    @property
    def busy(self) -> int:
        """Requests being answered."""
        return sum(not seen.answered and seen.closed_at is None for seen in self.requests)

    @property
    def unsent(self) -> int:
        """Bytes of answers that wait for somebody to read."""
        return sum(client.transport.get_write_buffer_size() for client in self.connections)

    def configure(self, wanted: dict[str, Any] | None) -> None:
        """What POST /fault says."""
        for name in ("health", "silent", "capacity", "draining", "full"):
            if wanted is not None and name in wanted:
                setattr(self, name, wanted.pop(name))
        if wanted is not None and "identity" in wanted:
            slot, generation = wanted.pop("identity")
            self.identity = slot, generation
        if wanted != {}:
            self.fault = wanted

    def page(self, url: bytes) -> tuple[int, bytes] | None:
        """Answers to what a fleet asks a worker; None: none at all."""
        if url == b"/metrics":
            return None if self.metrics is None else (200, self.metrics)
        self.probes += 1
        if self.silent:
            return None
        if url == b"/internal/whoami" and self.identity is not None:
            slot, generation = self.identity
            return 200, json.dumps({"slot": slot, "generation": generation, "model": "m", "pid": 1}).encode()
        if url == b"/health":
            health = {"draining": self.draining, "inflight": self.busy, "max_num_seqs": self.capacity}
            return self.health, json.dumps(health).encode()
        return (200, b"{}") if url == b"/ready" else (404, b"{}")

    def drop_idle(self) -> None:
        """Closes all connections, as a server does at the end of its keep-alive time."""
        for client in list(self.connections):
            client.transport.close()


class _Client(asyncio.Protocol):
    transport: asyncio.Transport
    headers: dict[str, str]
    body: list[bytes]

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.parser = httptools.HttpRequestParser(self)
        self.task: asyncio.Task[None] | None = None
        self.seen: Seen | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.worker.accepted += 1
        self.number = self.worker.accepted
        self.worker.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.connections.discard(self)
        if self.seen is not None and not self.seen.answered:
            self.seen.closed_at = asyncio.get_running_loop().time()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.headers, self.body = b"", {}, []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode().lower()
        assert key not in self.headers, f"two {key}"
        self.headers[key] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self.body)
        if self.url == b"/fault":
            self.worker.configure(json.loads(body))
            self._write(JSON_HEAD + b"content-length: 2\r\n\r\n{}")
            return
        if self.parser.get_method() == b"GET":
            page = self.worker.page(self.url)
            if page is not None:
                self._write(
                    b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (page[0], len(page[1]), page[1])
                )
            return
        self.seen = Seen(self.url.decode(), self.headers, body, self.number)
        self.worker.requests.append(self.seen)
        plan = json.loads(body).get("fake", {}) if self.worker.fault is None else dict(self.worker.fault)
        if self.worker.draining or self.worker.full:
            plan = {"do": "refuse", "why": "draining" if self.worker.draining else "queue_full"}
            self.seen.refused = True
        do = plan.pop("do", "json")
        if do == "json" and not plan:
            self._answer_json()
        else:
            self.task = asyncio.get_running_loop().create_task(self._run(do, plan))

    async def _run(self, do: str, plan: dict[str, Any]) -> None:
        await asyncio.sleep(plan.pop("wait", 0))
        await getattr(self, f"_do_{do}")(**plan)

    def _write(self, data: bytes) -> None:
        self.transport.write(data)

    def _done(self) -> None:
        if self.seen is not None:
            self.seen.answered = True

    def _answer_json(self) -> None:
        body = b'{"served_by":"%b"}' % self.worker.name.encode()
        self._write(JSON_HEAD + b"content-length: %d\r\nx-secret: inside\r\n\r\n%b" % (len(body), body))
        self._done()

    async def _do_json(self) -> None:
        self._answer_json()

    async def _do_echo(self) -> None:
        assert self.seen is not None
        body = self.seen.body
        self._write(JSON_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._done()

    async def _do_status(self, status: int, retry_after: str = "7") -> None:
        body = json.dumps({"error": {"message": "no", "type": "t", "param": "p", "code": "c"}}).encode()
        self._write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nretry-after: %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (status, retry_after.encode(), len(body), body)
        )
        self._done()

    async def _do_refuse(self, why: str) -> None:
        self._write(
            b"HTTP/1.1 503 Unavailable\r\nx-pagefleet-refused: %b\r\ncontent-length: 2\r\n\r\n{}"
            % why.encode()
        )
        self._done()

    async def _do_hang(self) -> None:
        await asyncio.Event().wait()

    async def _do_sse(self, **options: Any) -> None:
        await self._stream(b"text/event-stream; charset=utf-8", sse_event, b"data: [DONE]\n\n", **options)

    async def _do_ndjson(self, **options: Any) -> None:
        await self._stream(b"application/x-ndjson", ndjson_line, b"", **options)

    async def _stream(
        self,
        content_type: bytes,
        piece: Any,
        end: bytes,
        chunks: int = 10,
        delay: float = 0.0,
        die_at: int | None = None,
        torn: bool = False,
        stop_at: int | None = None,
        fail_at: int | None = None,
        gate_at: int | None = None,
    ) -> None:
        """`die_at`: the connection ends there (`torn`: inside a piece); `stop_at`: silence from there on;
        `fail_at`: an error object and an orderly end, as of an engine that has died; `gate_at`: silence until
        the worker's gate is opened."""
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\n\r\n" % content_type
        )
        for number in range(chunks):
            if number == die_at:
                if torn:
                    self._chunk(piece(number)[:9])
                self.transport.close()
                return
            if number == fail_at:
                self._fail(content_type)
                return
            if number == gate_at:
                await self.worker.gate.wait()
            if number == stop_at:
                await asyncio.Event().wait()
            self._chunk(piece(number))
            await self.writable.wait()
            if delay or number % 100 == 99:
                await asyncio.sleep(delay)
        if end:
            self._chunk(end)
        self._write(b"0\r\n\r\n")
        self._done()

    def _fail(self, content_type: bytes) -> None:
        error = b'{"error":{"message":"no","type":"server_error","param":null,"code":"engine_dead"}}'
        line = b"data: %b\n\n" % error if content_type.startswith(b"text/event-stream") else error + b"\n"
        self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(line), line))
        self._done()

    def _chunk(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _do_big(self, size: int) -> None:
        self._write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % size)
        block = bytes(range(256)) * 256
        for start in range(0, size, len(block)):
            self._write(block[: size - start])
            await self.writable.wait()
        self._done()

    async def _do_split(self) -> None:
        """One byte at a time."""
        body = b'{"split":true}'
        for byte in JSON_HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body):
            self._write(bytes([byte]))
            await asyncio.sleep(0.001)
        self._done()

    async def _do_reset(self) -> None:
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    async def _do_eof(self) -> None:
        """Everything was read, nothing answered."""
        self.transport.close()

    async def _do_garbage(self) -> None:
        self._write(b"I am no HTTP server\r\n\r\n")

    async def _do_short(self) -> None:
        self._write(JSON_HEAD + b'content-length: 100\r\n\r\n{"only":')
        await asyncio.sleep(0.05)
        self.transport.close()

    async def _do_extra(self) -> None:
        self._write(
            JSON_HEAD + b"content-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        )
        self._done()

    async def _do_unframed(self) -> None:
        self._write(JSON_HEAD + b"\r\n{}")
        self.transport.close()

    async def _do_framed_before(self) -> None:
        """The length is an interim answer's; the answer itself has none."""
        self._write(b"HTTP/1.1 103 Early Hints\r\ncontent-length: 2\r\n\r\n" + JSON_HEAD + b"\r\n{}")
        self.transport.close()

    async def _do_no_keep_alive(self) -> None:
        self._write(JSON_HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\n{}")
        self._done()
        self.transport.close()


def sse_event(number: int) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"token %d \xc3\xa9\xe2\x82\xac"}}]}\n\n' % number


def ndjson_line(number: int) -> bytes:
    return b'{"token":{"id":%d,"text":"t"}}\n' % number


async def _serve(uds: str | None, port: int, slot: str, generation: int, capacity: int | None) -> None:
    worker = FakeWorker(slot, identity=(slot, generation), capacity=capacity)
    await worker.start(uds, port)
    print(worker.address, flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slot", default="s")
    parser.add_argument("--generation", type=int, default=1)
    parser.add_argument("--capacity", type=int)
    arguments = parser.parse_args()
    uvloop.run(_serve(**vars(arguments)))
