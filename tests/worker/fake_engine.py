"""A scripted engine, a byte-level tokenizer, and a worker server around them: all but the model is real."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import httpx
import msgspec
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from worker.config import WorkerConfig
from worker.ipc.client import EngineDead, RequestStream
from worker.ipc.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    Progress,
    PromptLogprobs,
    RequestOutput,
    TokenLogprob,
)
from worker.pooling import PoolingConfig
from worker.server.app import create_app
from worker.server.lifecycle import HttpServer, uvicorn_config
from worker.server.state import ServerState
from worker.server.text_model import TextModel
from worker.text.parts import TokenizerParts
from worker.text.pieces import BYTE_OF_CHAR, Spelling
from worker.text.template import ChatTemplate
from worker.text.tokenizer import Tokenizer

MODEL = "bytes"
IM_START, IM_END = 256, 257  # ids 0 to 255 are the bytes themselves
VOCAB_SIZE = 258

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

INFO = EngineInfo(
    max_model_len=512,
    page_size=16,
    num_pages=65,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    vocab_size=VOCAB_SIZE,
    dtype="float32",
    kv_cache_dtype="float32",
    device="cpu",
    weight_bytes=1,
    kv_cache_bytes=1,
    load_seconds=0.0,
)
POOLING = PoolingConfig("last", normalize=True, size=4, sizes=(2,))
POOLING_INFO = msgspec.structs.replace(INFO, pooling=POOLING)


@cache
def byte_tokenizer(special: tuple[str, ...] = ()) -> Tokenizer:
    """One token a byte, the two marks of ChatML, and further `special` tokens."""
    backend = Backend(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = ("<|im_start|>", "<|im_end|>", *special)
    backend.add_special_tokens([AddedToken(mark) for mark in marks])
    parts = TokenizerParts(
        backend=backend,
        spelling=Spelling("byte-level"),
        special_ids=frozenset(range(IM_START, IM_START + len(marks))),
        eos_token_ids=(IM_END,),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )
    return Tokenizer(parts)


def say(text: str) -> Callable[[EngineRequest], list[int]]:
    """A script: the bytes of `text`, then end-of-sequence."""
    return lambda request: [*text.encode(), IM_END]


HELLO_WORLD = say("Hello, world!")


def prompt_entries(request: EngineRequest) -> list[PromptLogprobs]:
    """Of the prompt's tokens but the first, in two pieces: each the likeliest at -0.25, the next at -2."""
    tokens, width = request.prompt_token_ids, request.params.prompt_logprobs or 0
    pieces = []
    for start, end in ((1, len(tokens) // 2), (max(1, len(tokens) // 2), len(tokens))):
        count = max(0, end - start)
        ids = np.array([[t, (t + 1) % 256] for t in tokens[start:end]], np.int32).reshape(count, 2)
        values = np.tile(np.array([-0.25, -2.0], np.float32), (count, 1))
        pieces.append(
            PromptLogprobs(
                start,
                min(width, 2),
                values[:, 0].tobytes(),
                np.ones(count, np.int32).tobytes(),
                ids[:, :width].tobytes(),
                values[:, :width].tobytes(),
            )
        )
    return pieces


@dataclass(eq=False)
class FakeEngine:
    """Answers every request with its script's tokens, as long as `max_tokens` and stop tokens let it.

    A step gives every request `per_step` tokens. `paused` holds steps back; a step takes `step_seconds`.
    """

    script: Callable[[EngineRequest], list[int]] = HELLO_WORLD
    per_step: int = 1
    step_seconds: float = 0.0
    paused: bool = False
    info: EngineInfo | None = INFO
    state: Literal["loading", "ready", "dead"] = "ready"
    progress: Progress | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    failure: str | None = None
    pid: int | None = None
    logprob: float = -0.5
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    generated: int = 0

    def __post_init__(self) -> None:
        self.last_message = time.monotonic()
        self._running: dict[str, tuple[EngineRequest, RequestStream, list[int]]] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def submit(self, request: EngineRequest) -> RequestStream:
        if self.state == "dead":
            raise EngineDead("dead")
        assert request.request_id not in self._running
        stream = RequestStream()
        tokens = self.script(request)[: request.params.max_tokens]
        self.submitted.append(request)
        self._running[request.request_id] = (request, stream, tokens)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_busy())
        return stream

    def abort(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            self.aborted.append(request_id)
            running[1].put(RequestOutput(request_id, [], finish_reason="abort"))

    async def call(self, operation: str) -> str:
        self.calls.append(operation)
        return ""

    def die(self) -> None:
        self.state = "dead"
        self.failure = "killed by signal 9"
        for request_id, (_, stream, _) in self._running.items():
            stream.put(RequestOutput(request_id, [], finish_reason="error", error=self.failure))
        self._running.clear()

    async def _step_while_busy(self) -> None:
        while self._running:
            await asyncio.sleep(self.step_seconds)
            if not self.paused:
                self.step()

    @staticmethod
    def vector(request: EngineRequest) -> bytes:
        """Length and first token of the prompt, beside zeros: a vector of POOLING.size numbers."""
        tokens = request.prompt_token_ids
        return np.array([len(tokens), tokens[0], 0, 0], "<f4").tobytes()

    def step(self) -> None:
        self.last_message = time.monotonic()
        for request_id, (request, stream, tokens) in list(self._running.items()):
            new, rest = tokens[: self.per_step], tokens[self.per_step :]
            self.generated += len(new)
            if request.pooling is not None:
                stream.put(RequestOutput(request_id, [], finish_reason="stop", pooled=self.vector(request)))
                del self._running[request_id]
                continue
            output = RequestOutput(request_id, new, cached_tokens=len(request.prompt_token_ids) // 16 * 16)
            ends = () if request.params.ignore_eos else request.end_token_ids
            stopped = new and new[-1] in (*request.params.stop_token_ids, *ends)
            if stopped:
                output.stop_token, output.finish_reason = new[-1], "stop"
            elif not rest:
                output.finish_reason = "length"
            if request.params.prompt_logprobs is not None and stream.received == 0:
                output.prompt_logprobs = prompt_entries(request)
            if request.params.logprobs is not None:
                likely = [((token + 1) % 256, -1.0) for token in new]
                output.logprobs = [
                    TokenLogprob(
                        token, self.logprob, 1, [(token, self.logprob), other][: request.params.logprobs]
                    )
                    for token, other in zip(new, likely)
                ]
            stream.put(output)
            if output.finish_reason is not None:
                del self._running[request_id]
            else:
                self._running[request_id] = (request, stream, rest)


def make_state(engine: FakeEngine | None = None, **options: Any) -> ServerState:
    """The state of a worker that has loaded the byte tokenizer and `engine`."""
    config = WorkerConfig(
        **{"model": "/models/bytes", "served_model_name": MODEL, "slot": "bytes-0", **options}
    )
    state = ServerState(config)
    tokenizer = byte_tokenizer()
    state.text = TextModel(tokenizer, ChatTemplate(CHATML, tokenizer.bos_token, tokenizer.eos_token))
    state.engine = engine if engine is not None else FakeEngine()
    return state


def in_process(state: ServerState, client: tuple[str, int] = ("127.0.0.1", 1)) -> httpx.AsyncClient:
    """A client that calls the application without a socket; streams arrive whole."""
    transport = httpx.ASGITransport(create_app(state), client=client, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=60)


@asynccontextmanager
async def serving(state: ServerState) -> AsyncIterator[str]:
    """The worker behind a real socket; its base URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(uvicorn_config(state))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition` holds; AssertionError when it doesn't in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        await asyncio.sleep(0.01)


def strict_json(text: str | bytes) -> Any:
    """JSON as RFC 8259 has it: NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def events(stream: str) -> list[Any]:
    """The data of a whole event stream: objects, and "[DONE]" as it is."""
    frames = stream.split("\n\n")
    assert frames.pop() == "", "the stream ends within an event"
    data = [frame.removeprefix("data: ") for frame in frames]
    return [item if item == "[DONE]" else strict_json(item) for item in data]
