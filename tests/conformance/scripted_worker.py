"""`python -m tests.conformance.scripted_worker` is `python -m worker` whose model says what it is asked to:
the text between the last `SAY:` of the prompt and the end of that message. Its template has tools and
reasoning.

With `--fd` it is the engine process of such a worker.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from typing import Any

import msgspec

from tests.worker.chat_templates import QWEN3, text_side
from tests.worker.fake_engine import IM_END, INFO
from worker.__main__ import main
from worker.ipc.channel import ChannelClosed, EngineChannel
from worker.ipc.messages import EngineRequest, EngineStats, Ready, RequestOutput, StepDone, ToEngine
from worker.server import lifecycle
from worker.server.text_model import TextModel

PER_STEP = 3  # tokens, so that marks and characters are cut
ROOMY = msgspec.structs.replace(INFO, max_model_len=8192, num_pages=4097)
_SAY = list(b"SAY:")


def answer_to(request: EngineRequest) -> list[int]:
    prompt = request.prompt_token_ids
    start = max(at for at in range(len(prompt)) if prompt[at : at + len(_SAY)] == _SAY) + len(_SAY)
    said = prompt[start : prompt.index(IM_END, start) + 1]
    return said[: request.params.max_tokens]


def engine(fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel: EngineChannel[ToEngine] = EngineChannel(socket.socket(fileno=fd), ToEngine)
    channel.send(Ready(ROOMY))
    left: dict[str, list[int]] = {}
    steps = 0
    with contextlib.suppress(ChannelClosed):
        while True:
            outputs = []
            for message in channel.receive(0.002 if left else None):
                if message.shutdown:
                    return
                left |= {request.request_id: answer_to(request) for request in message.submit}
                for request_id in message.abort:
                    if left.pop(request_id, None) is not None:
                        outputs.append(RequestOutput(request_id, [], finish_reason="abort"))
            for request_id, tokens in list(left.items()):
                outputs.append(_next(request_id, tokens))
                if outputs[-1].finish_reason is not None:
                    del left[request_id]
            steps += 1
            channel.send(StepDone(outputs, EngineStats(steps=steps, running=len(left))))


def _next(request_id: str, tokens: list[int]) -> RequestOutput:
    new = tokens[:PER_STEP]
    del tokens[:PER_STEP]
    output = RequestOutput(request_id, new)
    if new[-1] == IM_END:
        output.stop_token, output.finish_reason = IM_END, "stop"
    elif not tokens:
        output.finish_reason = "length"
    return output


def scripted_text(source: Any, config: Any) -> TextModel:
    return text_side(QWEN3)


class NoSource:
    kind = "scripted"


if __name__ == "__main__":
    if "--fd" in sys.argv:
        engine(int(sys.argv[sys.argv.index("--fd") + 1]))
    else:
        command = [sys.executable, "-m", "tests.conformance.scripted_worker"]
        patched: Any = lifecycle
        patched.engine_command = lambda spec: command
        patched.resolve_source = lambda _, on_progress, revision: NoSource()
        patched.TextModel.load = scripted_text
        main()
