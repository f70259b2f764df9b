"""The engine process: `python -m worker.engine.process --fd N --parent-pid P --options JSON`.

It lives as long as its server process: the socket pair's end-of-file ends it, and the kernel kills it when
the parent goes while it is deep in loading.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, NoReturn

import msgspec

from contracts.options import WorkerOptions
from worker.ipc.channel import ChannelClosed, EngineChannel
from worker.ipc.messages import Failed, Progress, Ready, RequestOutput, StepDone, ToEngine

if TYPE_CHECKING:
    from worker.engine.loop import Engine

_PR_SET_PDEATHSIG = 1
# A step that fails costs its requests; when so many do in so many seconds, a new process is better than this.
_MOST_FAILURES = 3
_FAILURES_SECONDS = 60.0


class CannotStart(Exception):
    """The options, the model and this machine don't go together: trying again can't help."""


class EngineSpec(msgspec.Struct, frozen=True):
    """What the server process says when it starts the engine."""

    model: str
    options: dict[str, object]
    vocab_limit: int | None = None


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent's thread ends; end now if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--options", required=True, help="EngineSpec as JSON")
    arguments = parser.parse_args()
    die_with(arguments.parent_pid)
    # The server process decides when to end; a Ctrl-C at the terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = msgspec.convert(json.loads(arguments.options), EngineSpec)
    channel: EngineChannel[ToEngine] = EngineChannel(socket.socket(fileno=arguments.fd), ToEngine)
    try:
        run(spec, channel)
    except ChannelClosed:
        pass
    except CannotStart as error:
        _fail(channel, Failed(str(error), permanent=True))
    except Exception as error:
        traceback.print_exc()
        _fail(channel, Failed(str(error) or type(error).__name__))
    _exit(0)


def _fail(channel: EngineChannel[ToEngine], last_words: Failed) -> NoReturn:
    with contextlib.suppress(ChannelClosed):
        channel.send(last_words)
        channel.drain(1.0)
    _exit(1)


def _exit(code: int) -> NoReturn:
    """End without the interpreter's teardown: torch and triton complain in it, and the kernel is faster."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(spec: EngineSpec, channel: EngineChannel[ToEngine]) -> None:
    """Load, then step until the server says shutdown or goes away."""
    channel.send(Progress("import", 0, 1))
    import torch

    from worker.engine.config import resolve
    from worker.engine.loop import Engine
    from worker.weights.source import resolve_source

    options = WorkerOptions.model_validate(spec.options)
    try:
        source = resolve_source(spec.model, revision=options.revision)
        engine = Engine.load(resolve(source, options, spec.vocab_limit), channel.send)
    except ValueError as error:
        raise CannotStart(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"out of memory while loading; lower gpu_memory or free the card: {error}"
        ) from error
    channel.send(Ready(engine.info))
    # What loading made lives as long as the process: keep the collector from walking it again and again.
    gc.collect()
    gc.freeze()
    failures: deque[float] = deque(maxlen=_MOST_FAILURES)
    while True:
        messages = channel.receive(0 if engine.has_work else None)
        done = StepDone([], engine.stats())
        for message in messages:
            if message.shutdown:
                return
            _take_in(engine, message, done)
        if engine.has_work:
            done.outputs += _step(engine, failures)
        if messages or done.outputs:
            done.stats = engine.stats()
            channel.send(done)


def _step(engine: Engine, failures: deque[float]) -> list[RequestOutput]:
    """A step's outputs. One that fails ends its requests; raises when it can't be left at that."""
    try:
        return engine.step()
    except Exception as error:
        now = time.monotonic()
        if engine.failure or (len(failures) == _MOST_FAILURES and now - failures[0] < _FAILURES_SECONDS):
            raise RuntimeError(engine.failure or f"steps keep failing: {engine.reason(error)}") from error
        failures.append(now)
        traceback.print_exc()
        return engine.outputs


def _take_in(engine: Engine, message: ToEngine, done: StepDone) -> None:
    for request in message.submit:
        refused: RequestOutput | None = engine.add(request)
        if refused is not None:
            done.outputs.append(refused)
    for request_id in message.abort:
        aborted: RequestOutput | None = engine.abort(request_id)
        if aborted is not None:
            done.outputs.append(aborted)
    if message.call:
        done.outputs += engine.drain()
        done.replies += [(call_id, engine.call(operation)) for call_id, operation in message.call]


if __name__ == "__main__":
    main()
