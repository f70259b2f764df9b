"""A worker without a model for soaks: a process that starts in a moment, and writes down what it worked on.

    python -m bench.soak_worker WORKED --uds PATH --slot S --generation G

It answers what gateways, supervisor and rollouts ask of a worker, drains when it is told to, and then ends.
Requests have numbers (bench/soak_load.py): what isn't a stream comes back as it was, streams carry their
number in each event, so nobody else's answer can pass for it. Each number is in WORKED/SLOT.GENERATION before
its answer begins; a kill doesn't take that back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import struct
from pathlib import Path
from typing import Any

import uvloop

from contracts.notify import Notifier
from contracts.times import bucket_of

FIRST, PER_EVENT = 0.005, 0.002  # seconds of all answers, as the judge is told: not the busy machine's
NUMBER = struct.Struct("<q")
_HEAD = "HTTP/1.1 %d X\r\ncontent-type: %s\r\n%s\r\n"


def event(number: int, place: int) -> bytes:
    return b'data: {"number":%d,"event":%d}\n\n' % (number, place)


DONE = b"data: [DONE]\n\n"


class Worker:
    def __init__(self, worked: Path, slot: str, generation: int) -> None:
        self.slot, self.generation = slot, generation
        self.inflight = 0
        self.draining = False
        self.answers = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._worked = os.open(worked / f"{slot}.{generation}", flags, 0o600)

    def page(self, path: str) -> tuple[int, dict[str, Any]]:
        """Answers to GET."""
        times = {"ttft": {bucket_of(FIRST): self.answers}, "tpot": {bucket_of(PER_EVENT): self.answers}}
        pages: dict[str, dict[str, Any]] = {
            "/internal/whoami": {"slot": self.slot, "generation": self.generation, "pid": os.getpid()},
            "/internal/window": times,
            "/ready": {"status": "ready"},
            "/health": {"draining": self.draining, "inflight": self.inflight, "max_num_seqs": 64},
        }
        return (200, pages[path]) if path in pages else (404, _error("no such path", "not_found"))

    def command(self, path: str) -> dict[str, Any]:
        if path in ("/admin/drain", "/admin/undrain"):
            self.draining = path == "/admin/drain"
        return {"draining": self.draining, "inflight": self.inflight}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while request := await reader.readline():
                method, path = request.decode().split()[:2]
                length = 0
                while header := (await reader.readline()).strip().lower():
                    if header.startswith(b"content-length:"):
                        length = int(header.partition(b":")[2])
                body = await reader.readexactly(length)
                if method == "GET":
                    _send(writer, *self.page(path))
                elif path.startswith("/admin/"):
                    _send(writer, 200, self.command(path))
                elif self.draining:
                    refusal = _error("it is draining", "draining")
                    _send(writer, 503, refusal, "x-pagefleet-refused: draining\r\n")
                else:
                    await self._work(path, body, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _work(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.inflight += 1
        try:
            asked = json.loads(body)
            if "number" in asked:
                os.write(self._worked, NUMBER.pack(asked["number"]))
                await self._answer(asked, body, writer)
            elif path == "/generate_stream":
                _begin_stream(writer, "application/x-ndjson")
                for finish in (None, "length"):
                    _chunk(writer, b'{"token_ids":[1],"finish_reason":%b}\n' % json.dumps(finish).encode())
                _end_stream(writer)
            else:
                _send(writer, 200, _PROOF)
            self.answers += 1
        finally:
            self.inflight -= 1

    async def _answer(self, asked: dict[str, Any], body: bytes, writer: asyncio.StreamWriter) -> None:
        if not asked["stream"]:
            await asyncio.sleep(asked["wait"])
            writer.write(
                (_HEAD % (200, "application/json", f"content-length: {len(body)}\r\n")).encode() + body
            )
            return
        await asyncio.sleep(asked.get("first", FIRST))
        _begin_stream(writer, "text/event-stream")
        for place in range(asked["events"]):
            _chunk(writer, event(asked["number"], place))
            await writer.drain()
            await asyncio.sleep(asked["pause"])
        _chunk(writer, DONE)
        _end_stream(writer)


# What a rollout wants to see before it trusts a standby, for all kinds of prompts in one.
_PROOF = {
    "text": "x",
    "token_ids": [1, 2, 3],
    "logprobs": [{"token_id": 1, "logprob": -0.5}],
    "choices": [{"message": {"content": "It is 4."}}],
}


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any], headers: str = "") -> None:
    data = json.dumps(body).encode()
    head = _HEAD % (status, "application/json", f"{headers}content-length: {len(data)}\r\n")
    writer.write(head.encode() + data)


def _begin_stream(writer: asyncio.StreamWriter, kind: str) -> None:
    writer.write((_HEAD % (200, kind, "transfer-encoding: chunked\r\n")).encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _end_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"0\r\n\r\n")


async def run(worked: Path, uds: str, slot: str, generation: int) -> None:
    """Until SIGTERM, and then until no request is left."""
    worker, notifier, stop = Worker(worked, slot, generation), Notifier.from_environment(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await asyncio.start_unix_server(worker.serve, uds, limit=1 << 20)
    notifier.ready("serving")
    while not stop.is_set():
        notifier.alive()
        try:
            async with asyncio.timeout(1.0):
                await stop.wait()
        except TimeoutError:
            continue
    worker.draining = True
    notifier.stopping("draining")
    while worker.inflight:
        await asyncio.sleep(0.01)
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("worked", type=Path)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--slot", required=True)
    parser.add_argument("--generation", type=int, required=True)
    arguments = parser.parse_args()
    uvloop.run(run(**vars(arguments)))


if __name__ == "__main__":
    main()
