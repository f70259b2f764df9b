"""A load generator on bare sockets and epoll: closed loop, open loop, streams; every answer is checked.

One thread and no event loop, so that it is seldom what limits a measurement. Latencies are in seconds.
"""

from __future__ import annotations

import gc
import json
import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httptools

from bench.fake_worker import CONTENT, MODEL, answer, stream_body, token

Address = tuple[str, int]
PATIENCE = 30.0  # seconds without any answer after which a run has failed
PATH = "/v1/chat/completions"
_READ = 256 * 1024
_now = time.perf_counter


class WrongAnswer(RuntimeError):
    """A proxy's answer isn't what the worker said, or didn't come."""


@dataclass(frozen=True)
class Request:
    """One request's bytes. `expected`: the body that answers it; `same`: whether another one says the same,
    for proxies that write JSON anew."""

    data: bytes
    expected: bytes
    same: Callable[[bytes], bool]


def chat(headers: str = "") -> Request:
    """A small chat, not streamed."""
    return Request(request_data(16, headers), answer(), _same_message)


def streamed_chat(tokens: int, headers: str = "") -> Request:
    text = "".join(map(token, range(tokens)))
    data = request_data(tokens, headers, stream=True)
    return Request(data, stream_body(tokens), lambda body: _deltas(body) == text)


def request_data(tokens: int, headers: str = "", stream: bool = False) -> bytes:
    """A chat's bytes. `headers`: whole lines of them."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write one sentence about rivers."}],
        "max_tokens": tokens,
        "temperature": 0,
        **({"stream": True} if stream else {}),
    }
    data = json.dumps(body)
    head = f"POST {PATH} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(data)}\r\n\r\n{data}".encode()


def _same_message(body: bytes) -> bool:
    value = json.loads(body)
    return bool(value["choices"][0]["message"]["content"] == CONTENT and value["usage"]["total_tokens"] == 28)


def _deltas(body: bytes) -> str:
    """The text of a stream; empty unless it ends as it should."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if lines.pop() != b"[DONE]":
        return ""
    choices = (json.loads(line)["choices"] for line in lines)
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)


class Client:
    """One kept-alive connection, one request at a time."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection(address, PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.due = 0.0
        self.first = 0.0  # when the first byte of the body came
        self._request: Request
        self._pieces: list[bytes] = []
        self._complete = False
        self._parser = httptools.HttpResponseParser(self)

    def send(self, request: Request, due: float) -> None:
        self._request, self.due, self.first = request, due, 0.0
        self._pieces.clear()
        self._complete = False
        if self.socket.send(request.data) != len(request.data):
            raise WrongAnswer("the proxy takes no more bytes")

    def receive(self) -> bool:
        """Takes what has come; whether the answer is complete, and then it is right."""
        data = self.socket.recv(_READ)
        if not data:
            raise WrongAnswer(f"connection closed after {b''.join(self._pieces)[:500]!r}")
        self._parser.feed_data(data)
        if not self._complete:
            return False
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        status, request = self._parser.get_status_code(), self._request
        if status != 200 or (body != request.expected and not request.same(body)):
            raise WrongAnswer(f"status {status}: {body[:500]!r}")
        return True

    def on_body(self, data: bytes) -> None:
        if not self.first:
            self.first = _now()
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._complete = True


@dataclass
class Run:
    """What came of a run. `firsts`: until the first byte of the body."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def done(self, client: Client) -> None:
        self.latencies.append(_now() - client.due)
        self.firsts.append(client.first - client.due)


@contextmanager
def _clients(address: Address, count: int) -> Iterator[tuple[select.epoll, dict[int, Client]]]:
    clients = {}
    with select.epoll() as poll:
        try:
            for _ in range(count):
                client = Client(address)
                clients[client.socket.fileno()] = client
                poll.register(client.socket, select.EPOLLIN)
            gc.collect()
            gc.disable()
            yield poll, clients
        finally:
            gc.enable()
            for client in clients.values():
                client.socket.close()


def closed_loop(address: Address, request: Request, connections: int, seconds: float) -> Run:
    """Every connection sends its next request as soon as it has its answer."""
    run = Run()
    with _clients(address, connections) as (poll, clients):
        started = _now()
        ends = started + seconds
        for client in clients.values():
            client.send(request, _now())
        busy = connections
        while busy:
            ready = poll.poll(PATIENCE)
            if not ready:
                raise WrongAnswer(f"no answer for {PATIENCE:g} s")
            for descriptor, _ in ready:
                client = clients[descriptor]
                if client.receive():
                    run.done(client)
                    now = _now()
                    if now < ends:
                        client.send(request, now)
                    else:
                        busy -= 1
        run.seconds = _now() - started
    return run


def open_loop(
    address: Address, request: Request, rate: float, seconds: float, connections: int = 128, seed: int = 0
) -> Run:
    """Requests at the times of a Poisson process of `rate` a second, whatever became of earlier ones.

    Latencies count from the time a request was due, so one that waits for the generator or for a free
    connection has waited (the correction for coordinated omission).
    """
    run = Run()
    rng = random.Random(seed)
    arrivals = deque(_arrivals(rng, rate, seconds))
    total, waiting = len(arrivals), deque[float]()
    with _clients(address, connections) as (poll, clients):
        idle = list(clients.values())
        started = _now()
        while len(run.latencies) < total:
            now = _now() - started
            while arrivals and arrivals[0] <= now:
                waiting.append(started + arrivals.popleft())
            while waiting and idle:
                idle.pop().send(request, waiting.popleft())
            # epoll's own limit is in milliseconds, select's in microseconds
            pause = max(0.0, started + arrivals[0] - _now()) if arrivals else PATIENCE
            if not select.select([poll.fileno()], [], [], pause)[0]:
                if not arrivals:
                    raise WrongAnswer(f"no answer for {PATIENCE:g} s")
                continue
            for descriptor, _ in poll.poll(0):
                client = clients[descriptor]
                if client.receive():
                    run.done(client)
                    idle.append(client)
        run.seconds = _now() - started
    return run


def _arrivals(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)
