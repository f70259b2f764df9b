"""An engine process without a model, for tests of the server side: `python scripted_engine.py MODE --fd N`.

echo: each request gets its prompt tokens back, one a step. die: ends after two steps. fail: says why it can't
start. stall: never becomes ready. slow: like echo, 50 ms a step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time

from worker.ipc.channel import ChannelClosed, EngineChannel
from worker.ipc.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    Failed,
    Progress,
    Ready,
    RequestOutput,
    StepDone,
    ToEngine,
)

INFO = EngineInfo(
    max_model_len=512,
    page_size=16,
    num_pages=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    vocab_size=1000,
    dtype="float32",
    kv_cache_dtype="float32",
    device="cpu",
    weight_bytes=1,
    kv_cache_bytes=1,
    load_seconds=0.0,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--fd", type=int)
    arguments = parser.parse_args()
    channel: EngineChannel[ToEngine] = EngineChannel(socket.socket(fileno=arguments.fd), ToEngine)
    channel.send(Progress("weights", 1, 2))
    if arguments.mode == "fail":
        channel.send(Failed("no room for the KV cache"))
        channel.drain(1)
        os._exit(1)
    if arguments.mode == "stall":
        time.sleep(60)
    channel.send(Ready(INFO))
    with contextlib.suppress(ChannelClosed):
        serve(channel, arguments.mode)


def serve(channel: EngineChannel[ToEngine], mode: str) -> None:
    running: dict[str, tuple[EngineRequest, int]] = {}
    steps = 0
    while True:
        done = StepDone([], EngineStats())
        for message in channel.receive(0 if running else None):
            if message.shutdown:
                return
            for request in message.submit:
                running[request.request_id] = (request, 0)
            for name in message.abort:
                if running.pop(name, None) is not None:
                    done.outputs.append(RequestOutput(name, [], finish_reason="abort"))
            done.replies += [(number, "" if what == "ping" else what) for number, what in message.call]
        for name, (request, position) in list(running.items()):
            last = position + 1 == len(request.prompt_token_ids)
            token = request.prompt_token_ids[position]
            done.outputs.append(RequestOutput(name, [token], finish_reason="length" if last else None))
            running[name] = (request, position + 1)
            if last:
                del running[name]
        steps += bool(done.outputs)
        done.stats = EngineStats(steps=steps, running=len(running))
        channel.send(done)
        if mode == "die" and steps == 2:
            os._exit(3)
        if mode == "slow":
            time.sleep(0.05)


if __name__ == "__main__":
    main()
