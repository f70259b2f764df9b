"""An engine process without a model: `A` after `A`, a token every few milliseconds. The channel is real.

`--load-seconds` is how long it pretends to load.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import time

from worker.ipc.channel import ChannelClosed, EngineChannel
from worker.ipc.messages import (
    EngineInfo,
    EngineStats,
    Failed,
    Progress,
    Ready,
    RequestOutput,
    StepDone,
    ToEngine,
    TokenLogprob,
)

STEP_SECONDS = 0.02
INFO = EngineInfo(
    max_model_len=512,
    page_size=16,
    num_pages=65,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    vocab_size=258,
    dtype="float32",
    kv_cache_dtype="float32",
    device="cpu",
    weight_bytes=1,
    kv_cache_bytes=1,
    load_seconds=0.0,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--fail", default="no")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel: EngineChannel[ToEngine] = EngineChannel(socket.socket(fileno=arguments.fd), ToEngine)
    channel.send(Progress("weights", 1, 2))
    time.sleep(arguments.load_seconds)
    if arguments.fail != "no":
        channel.send(Failed("the KV cache is too small", permanent=arguments.fail == "always"))
        channel.drain(1.0)
        return
    channel.send(Ready(INFO))
    with contextlib.suppress(ChannelClosed):
        serve(channel)


def serve(channel: EngineChannel[ToEngine]) -> None:
    left: dict[str, int] = {}
    with_logprobs: set[str] = set()
    steps = 0
    while True:
        outputs = []
        for message in channel.receive(STEP_SECONDS if left else None):
            if message.shutdown:
                return
            for request in message.submit:
                left[request.request_id] = request.params.max_tokens or 1
                if request.params.logprobs is not None:
                    with_logprobs.add(request.request_id)
            for request_id in message.abort:
                if left.pop(request_id, None) is not None:
                    outputs.append(RequestOutput(request_id, [], finish_reason="abort"))
        steps += 1
        for request_id in list(left):
            left[request_id] -= 1
            reason = None if left[request_id] else "length"
            logprobs = [TokenLogprob(65, -0.5, 1, [])] if request_id in with_logprobs else None
            outputs.append(RequestOutput(request_id, [65], logprobs, finish_reason=reason))  # type: ignore[arg-type]
            if reason:
                del left[request_id]
                with_logprobs.discard(request_id)
        channel.send(StepDone(outputs, EngineStats(steps=steps, running=len(left))))


if __name__ == "__main__":
    main()
