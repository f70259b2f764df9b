"""A worker or gateway without a model, for the supervisor: real processes, real sockets, chosen misbehaviour.

fake_process.py worker BEHAVIOUR --uds PATH --slot S --generation G
fake_process.py gateway BEHAVIOUR --fd N --board PATH --generation G

BEHAVIOUR `slow` loads for 1.5 seconds, `slow10` for 10.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter

# What the real engine does: it ends when its parent does. In a session of its own, to be hard to find.
_ENGINE = "import os, time\nparent = os.getppid()\nwhile os.getppid() == parent: time.sleep(0.1)"
STARTED = time.monotonic()
ASKED: Counter[str] = Counter()  # by path: what depends on it is seen, however late the questions come


def answer(path: str, options: argparse.Namespace) -> tuple[int, dict[str, object]]:
    behaviour = options.behaviour
    ASKED[path] += 1
    if path == "/internal/whoami":
        generation = 99 if behaviour == "impostor" else options.generation
        return 200, {"slot": options.slot, "generation": generation, "model": "fake", "pid": os.getpid()}
    if path == "/ready":
        if behaviour == "hopeless":
            return 503, {"status": "failed", "phase": "failed", "message": "the KV cache is too small"}
        if behaviour == "stall":
            return 503, {"phase": "loading weights", "done": 1, "total": 10}
        if behaviour.startswith("slow") and is_loading(float(behaviour[4:] or 1.5)):
            return 503, {"phase": "loading weights", "done": ASKED[path], "total": 1000}
        return 200, {}
    if path == "/health":
        draining = options.uds is not None and os.path.exists(f"{options.uds}.draining")
        return (503 if behaviour == "sick" else 200), {"draining": draining}
    return (200, {"served_by": options.slot}) if path.startswith("/v1/") else (404, {})


def is_loading(seconds: float) -> bool:
    return ASKED["/ready"] < 5 or time.monotonic() < STARTED + seconds


async def serve(listener: socket.socket, options: argparse.Namespace) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            length = 0
            while header := (await reader.readline()).strip().lower():
                if header.startswith(b"content-length:"):
                    length = int(header.partition(b":")[2])
            await reader.readexactly(length)
            if options.behaviour == "busy" and b"/health" in request:
                await asyncio.sleep(0.7)
            status, body = answer(request.split()[1].decode(), options)
            data = json.dumps(body).encode()
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
            if options.behaviour == "hopeless" and ASKED["/ready"]:
                loop.call_later(0.3, os._exit, 3)
            if options.behaviour == "engine-dies" and ASKED["/health"] == 3:
                say_and_exit()
        writer.close()

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    if options.behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
    await start(handle, sock=listener)
    if options.board is not None:
        board = os.open(options.board, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(board, 0, 64 * 1024)
        asyncio.ensure_future(sign(board, options.generation))  # noqa: RUF006
    await stop.wait()


async def sign(board: int, generation: int) -> None:
    """Lives, as gateway.board says it; that can't be imported here."""
    magic = int.from_bytes(b"pfboard1", "little")
    while True:
        words = struct.pack("<6qd", magic, 64, os.getpid(), generation, 1, 0, time.monotonic())
        os.pwrite(board, words, 0)
        await asyncio.sleep(0.1)


def say_and_exit() -> None:
    line = "2026-01-02 03:04:05,678 ERROR org/m:x: the engine has ended: signal 9"
    print(f"{line}\n", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("behaviour")
    parser.add_argument("--uds")
    parser.add_argument("--slot")
    parser.add_argument("--generation", type=int)
    parser.add_argument("--fd", type=int)
    parser.add_argument("--board")
    options = parser.parse_args()
    print(f"fake {options.role} starts as {options.behaviour}", flush=True)
    if options.behaviour == "bad-configuration":
        print("2026-01-02 03:04:05,678 ERROR m: the engine did not start: too long", file=sys.stderr)
        print("--max-model-len: must be at most 2048", file=sys.stderr)
        sys.exit(2)
    if options.behaviour == "crash":
        sys.exit(1)
    if options.role == "gateway":
        listener = socket.socket(fileno=options.fd)
    else:
        subprocess.Popen([sys.executable, "-S", "-c", _ENGINE], start_new_session=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(options.uds)
        listener.listen()
    asyncio.run(serve(listener, options))


if __name__ == "__main__":
    main()
