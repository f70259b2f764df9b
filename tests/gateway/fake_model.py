"""A worker without a model for rollouts: a process of its own that answers what gateways and drivers ask.

    fake_model.py BEHAVIOUR --uds PATH --slot S --generation G

A request for `{"model": "m", "fake": {"chunks": 20, "delay": 0.05}}` is answered slowly, as a stream if it
says so. Behaviours, joined by "__": `wrong` answers golden prompts wrong, `moody` never twice the same, `nan`
with numbers that aren't, `silent` with nothing, `errs` gives users 500, `weary-N` gives probes 500 after the
Nth, `slow` takes users and probes 4 s to the first token (on a busy machine less is nothing), `mortal-N` dies
N s after it is ready, `stuck` doesn't end when told to, `late-N` takes N seconds to load, `crash` doesn't
start, `impostor` is somebody else once it is ready, `nameless` takes no names, `cold` flaps (ready and well
only every second time that it is asked) and gives users 500 until it has answered a golden prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

from contracts.times import bucket_of

Answer = tuple[int, dict[str, Any]]
LOADING = {"status": "loading", "phase": "weights", "done": 30, "total": 100}


class Model:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.behaviour = set(options.behaviour.split("__"))
        self.started = time.monotonic()
        self.inflight = 0
        self.draining = False
        self.moods = itertools.count(1)
        self.is_cold = "cold" in self.behaviour
        self.asked: Counter[str] = Counter()
        self.ttft: Counter[int] = Counter()
        self.tpot: Counter[int] = Counter()
        self.aborted = asyncio.Event()
        self.probes = 0

    def number(self, name: str) -> float | None:
        """N of the behaviour `name-N`."""
        found = [one.rpartition("-")[2] for one in self.behaviour if one.startswith(f"{name}-")]
        return float(found[0]) if found else None

    def get(self, path: str) -> Answer:
        self.asked[path] += 1
        if self.is_cold and path in ("/ready", "/health") and self.asked[path] % 2:
            return 503, LOADING
        if path == "/internal/whoami":
            generation = self.options.generation + ("impostor" in self.behaviour and self.ready)
            return 200, {"slot": self.options.slot, "generation": generation, "pid": os.getpid()}
        if path == "/ready":
            return (200, {"status": "ready"}) if self.ready else (503, LOADING)
        if path == "/health":
            return 200, {"draining": self.draining, "inflight": self.inflight, "max_num_seqs": 64}
        if path == "/internal/window":
            return 200, {"ttft": self.ttft, "tpot": self.tpot}
        return 404, {"error": {"message": "no such path", "type": "t", "param": None, "code": "not_found"}}

    @property
    def ready(self) -> bool:
        return time.monotonic() - self.started >= (self.number("late") or 0)

    def admin(self, path: str) -> Answer:
        if path == "/admin/abort":
            aborted, self.aborted = self.aborted, asyncio.Event()
            aborted.set()
            return 200, {"aborted": self.inflight}
        if path == "/admin/names":
            return (422, {}) if "nameless" in self.behaviour else (200, {})
        self.draining = path == "/admin/drain"
        return 200, {"draining": self.draining, "inflight": self.inflight}

    def proof(self, path: str) -> Answer:
        """Answers to prompts of the proof."""
        mood = next(self.moods) if "moody" in self.behaviour else 1
        number = None if "nan" in self.behaviour else -0.5
        if path == "/generate":
            ids = [] if "silent" in self.behaviour else [mood, 2, 3]
            return 200, {"text": "x", "token_ids": ids, "logprobs": [{"token_id": 1, "logprob": number}]}
        self.is_cold = False
        text = "Five." if "wrong" in self.behaviour else "It is 4."
        return 200, {"choices": [{"message": {"content": text}}], "served_by": self.options.slot}


async def handle(model: Model, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while request := await reader.readline():
            method, path = request.decode().split()[:2]
            length = 0
            while header := (await reader.readline()).strip().lower():
                if header.startswith(b"content-length:"):
                    length = int(header.partition(b":")[2])
            body = json.loads(await reader.readexactly(length) or b"{}")
            if method == "GET":
                send(writer, *model.get(path))
            elif path.startswith("/admin/"):
                send(writer, *model.admin(path))
            elif model.draining:
                send(writer, 503, {}, "x-pagefleet-refused: draining\r\n")
            else:
                model.inflight += 1
                try:
                    await answer(model, path, body, writer)
                finally:
                    model.inflight -= 1
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


def send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any], headers: str = "") -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


async def answer(model: Model, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Counts its times, as workers do."""
    fake = body.get("fake", {})
    is_probe = path == "/generate_stream"
    model.probes += is_probe
    is_weary = is_probe and model.probes > (model.number("weary") or math.inf)
    if is_weary or ("errs" in model.behaviour and (fake or is_probe)) or (model.is_cold and fake):
        send(
            writer, 500, {"error": {"message": "it errs", "type": "t", "param": None, "code": "engine_error"}}
        )
        return
    first = 4.0 if "slow" in model.behaviour and (fake or is_probe) else 0.005
    await asyncio.sleep(first)
    model.ttft[bucket_of(first)] += 1
    if is_probe:
        await stream(model, writer, "application/x-ndjson", 4, 0.002)
    elif body.get("stream"):
        await stream(model, writer, "text/event-stream", fake.get("chunks", 5), fake.get("delay", 0.002))
    else:
        await asyncio.sleep(fake.get("delay", 0.002) * fake.get("chunks", 1))
        send(writer, *model.proof(path))
    model.tpot[bucket_of(0.002)] += 1


async def stream(model: Model, writer: asyncio.StreamWriter, kind: str, chunks: int, delay: float) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    is_sse = kind == "text/event-stream"
    aborted = model.aborted
    for number in range(chunks):
        last = number == chunks - 1
        if aborted.is_set():
            chunk(writer, b'data: {"error": {"message": "aborted", "code": "request_aborted"}}\n\n')
            break
        if is_sse:
            chunk(writer, b'data: {"number": %d}\n\n' % number + (b"data: [DONE]\n\n" if last else b""))
        else:
            piece = {"token_ids": [1], "finish_reason": "length" if last else None}
            chunk(writer, json.dumps(piece).encode() + b"\n")
        await writer.drain()
        await asyncio.sleep(delay)
    writer.write(b"0\r\n\r\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--uds")
    parser.add_argument("--slot")
    parser.add_argument("--generation", type=int)
    model = Model(parser.parse_args())
    if "crash" in model.behaviour:
        print("2026-01-02 03:04:05,678 ERROR m:x: there is no such model", file=sys.stderr)
        sys.exit(1)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    if "stuck" in model.behaviour:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    await asyncio.start_unix_server(lambda r, w: handle(model, r, w), model.options.uds)
    if (seconds := model.number("mortal")) is not None:
        loop.call_later(seconds + (model.number("late") or 0), os._exit, 3)
    await stop.wait()
    while model.inflight:
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main())
